"""Transformers on a GPU: attention and KernelConfig's norms in bfloat16, against eager."""

import functools
import warnings
from pathlib import Path

import pytest
import torch
from integration.models import (
    ATTENTION,
    ATTENTION_WITH_CACHE,
    CONFIGS,
    accept_in_gpt_oss,
    assert_no_worse,
    finish,
    make_model,
    random_tokens,
    run,
    run_one_by_one,
)
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    KernelConfig,
    modeling_flash_attention_utils,
)

pytestmark = pytest.mark.gpu
BF16 = {"dtype": torch.bfloat16}
SEQLEN = 150  # more than one tile of keys


@pytest.fixture(params=list(CONFIGS))
def family(request, monkeypatch, kernel) -> str:
    accept_in_gpt_oss(monkeypatch)
    return request.param


def eager(family: str, dtype: torch.dtype):
    return make_model(family, "eager", dtype, weights_dtype=torch.bfloat16).cuda()


def test_full_batch(family):
    tokens = random_tokens(2, SEQLEN).cuda()
    ours = run(make_model(family, ATTENTION, **BF16).cuda(), input_ids=tokens)
    plain = run(eager(family, torch.bfloat16), input_ids=tokens)
    assert_no_worse(ours, plain, run(eager(family, torch.float64), input_ids=tokens))


def test_padding(family):
    tokens = random_tokens(3, SEQLEN).cuda()
    mask = torch.zeros_like(tokens)
    for row, length in enumerate((SEQLEN, 70, 1)):
        mask[row, SEQLEN - length :] = 1
    positions, keep = (mask.cumsum(1) - 1).clamp(min=0), mask.bool()
    model = make_model(family, ATTENTION, **BF16).cuda()
    output = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    sequences = [row[kept] for row, kept in zip(tokens, keep, strict=True)]
    plain = run_one_by_one(eager(family, torch.bfloat16), sequences)
    exact = run_one_by_one(eager(family, torch.float64), sequences)
    assert_no_worse(finish(model, output.logits[keep]), plain, exact)


def test_kernel_config(kernel, tmp_path):
    layer = ("org/flash-attn-norm:LlamaRMSNorm", {"revision": "v1", "trust_remote_code": True})
    make_model("qwen3", "eager").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map="cuda",
        attn_implementation=ATTENTION,
        kernel_config=KernelConfig({"RMSNorm": {"cuda": layer}}, inherit_mapping=False),
        use_kernels=True,
        **BF16,
    )
    norm = model.model.norm
    assert norm.forward.__func__ is kernel.layers.LlamaRMSNorm.forward
    tokens = random_tokens(2, SEQLEN).cuda()
    plain, exact = (
        run(eager("qwen3", dtype), input_ids=tokens) for dtype in (torch.bfloat16, torch.float64)
    )
    assert_no_worse(run(model, input_ids=tokens), plain, exact)


def test_float32_attention_is_refused_with_the_cure(kernel):
    model = make_model("qwen3", ATTENTION).cuda()
    with pytest.raises(ValueError, match="float32") as error:
        model(random_tokens(1, 9).cuda())
    assert "autocast" in str(error.value)


def test_autocast(kernel):
    tokens = random_tokens(2, SEQLEN).cuda()
    outcomes = []
    for implementation in (ATTENTION, "eager"):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outcomes.append(run(make_model("qwen3", implementation).cuda(), input_ids=tokens))
    exact = make_model("qwen3", "eager", torch.float64).cuda()
    assert_no_worse(*outcomes, run(exact, input_ids=tokens))


def test_a_training_step_waits_for_nothing_of_ours(kernel):
    """Torch warns where Python was when the host waited; Transformers does, to look at a mask."""
    model = make_model("qwen3", ATTENTION).cuda().train()
    layer = LayerRepository(
        "org/flash-attn-norm", layer_name="LlamaRMSNorm", revision="v1", trust_remote_code=True
    )
    with use_kernel_mapping({"RMSNorm": {"cuda": layer}}, inherit_mapping=False):
        kernelize(model, mode=Mode.TRAINING, device="cuda")
    tokens = random_tokens(2, SEQLEN).cuda()

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    step()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
            tokens[0, 0].item()  # noticed, too: the mode works
        finally:
            torch.cuda.set_sync_debug_mode("default")
    message = "called a synchronizing CUDA operation"
    waits = {Path(one.filename) for one in found if message in str(one.message)}
    assert {path for path in waits if "transformers" not in path.parts} == {Path(__file__)}


def test_generate(family):
    """Cached decode: one query row, many keys. Both choose by the logits of a bfloat16 model."""
    tokens = random_tokens(2, 33).cuda()
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    model = make_model(family, ATTENTION, **BF16).cuda()
    result = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )
    # The same tokens in one forward pass give the logits of each step.
    whole = eager(family, torch.bfloat16)(result.sequences).logits[:, 32:-1].float()
    stepwise = torch.stack(result.logits, dim=1).float()
    exact = eager(family, torch.float64)(result.sequences).logits[:, 32:-1].float()
    assert (stepwise - exact).norm() <= 2 * (whole - exact).norm()


def test_continuous_batching(kernel, monkeypatch):
    """Decode steps go through block tables and CUDA graphs. Each token is one that a bfloat16 model
    may choose: its exact logit is the largest but for twice eager's own error."""
    steps = []
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(kernel, "flash_attn_with_kvcache", _recording(kernel, steps))
    prompts = [random_tokens(length).tolist() for length in (3, 170, 40, 255, 256, 257)]
    config = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=-1, pad_token_id=0)
    sizes = ContinuousBatchingConfig(page_size=256, num_blocks=64, max_batch_tokens=512)
    long = {"max_position_embeddings": 512}
    model = make_model("qwen3", ATTENTION_WITH_CACHE, **BF16, **long).cuda()
    outputs = model.generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=sizes
    )
    assert steps
    assert len(outputs) == len(prompts)
    weights = {"weights_dtype": torch.bfloat16, **long}
    plain = make_model("qwen3", "eager", torch.bfloat16, **weights).cuda()
    exact = make_model("qwen3", "eager", torch.float64, **weights).cuda()
    for output in outputs.values():
        tokens = torch.tensor([[*output.prompt_ids, *output.generated_tokens]]).cuda()
        chosen = tokens[0, len(output.prompt_ids) :]
        assert len(chosen) == 40
        with torch.no_grad():
            rows = slice(len(output.prompt_ids) - 1, -1)
            wanted, in_bf16 = (m(tokens).logits[0, rows].double() for m in (exact, plain))
        slack = 2 * (in_bf16 - wanted).abs().max()
        behind = wanted.max(dim=-1).values - wanted.gather(1, chosen[:, None])[:, 0]
        assert (behind <= 2 * slack).all()


def _recording(kernel, steps):
    function = kernel.flash_attn_with_kvcache

    @functools.wraps(function)
    def record(*arguments, **keywords):
        steps.append(keywords["block_table"].shape)
        return function(*arguments, **keywords)

    return record
