"""What `kernels benchmark` runs: the main functions on sizes that a CPU manages too, each
verified against torch's own operation. The figures in docs/performance.md come from the other
scripts here."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


def attention_reference(q, k, v):
    """Causal attention; q (batch, seqlen, heads, head_dim), k and v with fewer heads."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


class AttentionBenchmark(Benchmark):
    seed = 0

    def setup(self):
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.q = torch.randn(2, 1024, 16, 64, **options)
        self.k = torch.randn(2, 1024, 4, 64, **options)
        # The verification allows 1e-2 whatever the size of a value; bfloat16 rounds 0.5 by 1e-3.
        self.v = 0.2 * torch.randn(2, 1024, 4, 64, **options)

    def benchmark_gqa_causal(self):
        self.out = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=True)

    def verify_gqa_causal(self) -> torch.Tensor:
        return attention_reference(self.q, self.k, self.v)

    def setup_gqa_backward(self):
        self.setup()
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()
        self.dout = torch.randn_like(self.q)

    def benchmark_gqa_backward(self):
        out = self.kernel.flash_attn_func(self.q, self.k, self.v, causal=True)
        (self.out,) = torch.autograd.grad(out, self.q, self.dout)

    def verify_gqa_backward(self) -> torch.Tensor:
        out = attention_reference(self.q, self.k, self.v)
        return torch.autograd.grad(out, self.q, self.dout)[0]


class NormBenchmark(Benchmark):
    seed = 0

    def setup(self):
        self.x = torch.randn(4096, 2048, device=self.device)
        self.weight = torch.randn(2048, device=self.device)

    def benchmark_rms_norm(self):
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_rms_norm(self) -> torch.Tensor:
        return F.rms_norm(self.x, (2048,), self.weight, 1e-6)

    def setup_layer_norm(self):
        self.setup()

    def benchmark_layer_norm(self):
        self.out = self.kernel.layer_norm(self.x, self.weight)

    def verify_layer_norm(self) -> torch.Tensor:
        return F.layer_norm(self.x, (2048,), self.weight)
