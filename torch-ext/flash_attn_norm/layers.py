"""Layers that stand in for a model's own norms, by Transformers' ``KernelConfig`` or ``kernelize``.

Each takes over the forward method of a module and finds that module's attributes on ``self``; it
has no constructor and no members of its own. All have gradients and compile with
``fullgraph=True``.
"""

import torch
from torch import Tensor, nn

from .norms import layer_norm, rms_norm


class LlamaRMSNorm(nn.Module):
    """For norms with ``weight`` and ``variance_epsilon``, Transformers' "RMSNorm".

    Rounds the normalized value to the input's dtype before it multiplies it with the weight, as
    these models do. The result has the input's dtype, also with a float32 weight.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, casting_mode="llama")


class LigerRMSNorm(nn.Module):
    """``LlamaRMSNorm`` under the name that mappings for the Liger kernels use."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, casting_mode="llama")


class GemmaRMSNorm(nn.Module):
    """For norms with ``eps`` and a ``weight`` that is stored around zero ("RMSNormZeroCentered").

    Multiplies with ``1 + weight`` in float32 and rounds once.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, weight_offset=1.0, casting_mode="gemma")


class RMSNorm(nn.Module):
    """For ``torch.nn.RMSNorm`` over the last dimension.

    ``weight`` may be None. An ``eps`` of None is the machine epsilon of float32, which torch takes
    for all three dtypes.
    """

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        _refuse_more_dimensions(self)
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps, casting_mode="gemma")


class LayerNorm(nn.Module):
    """For ``torch.nn.LayerNorm`` over the last dimension; ``weight`` and ``bias`` may be None."""

    can_torch_compile = True
    has_backward = True

    def forward(self, input: Tensor) -> Tensor:
        _refuse_more_dimensions(self)
        return layer_norm(input, self.weight, self.bias, self.eps)


def _refuse_more_dimensions(module: nn.Module) -> None:
    # torch.nn's norms reach over as many dimensions as normalized_shape has; these over the last.
    normalized_shape = getattr(module, "normalized_shape", (0,))
    if len(normalized_shape) != 1:
        raise ValueError(
            f"normalized_shape is {tuple(normalized_shape)}; this layer normalizes over the last "
            "dimension only, so it must have one entry"
        )
