"""An update on a GPU that is not there: which kernels run in which types, and that nothing waits for the device."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_schema.training import ModelConfig
from attn_train.model import check_model, configured
from attn_train.precision import forward_precision, validation_precision
from fake_gpu import Operations, fake_gpu

GPU = torch.device("cuda:0")
GPT2 = ModelConfig(hidden_size=128, num_layers=2, num_heads=2, max_seq_len=128, mechanism="mha", positions="learned")
LLAMA = GPT2.replace(mechanism="gqa", num_kv_heads=1, positions="rotary", norm="rms", feed_forward="swiglu")
FUSED = "_scaled_dot_product_cudnn_attention"


def forward(text, config, changed, model, precision="bfloat16"):
    """The operations of a forward pass with its loss, and the Triton programs."""
    config = changed(config, model=model, precision=precision)
    task = text.task(config)
    with fake_gpu() as started:
        with GPU:
            family, made = configured(config.model, text.model_fields)
            built = family.build(made).train()
        batch = tuple(part.to(GPU) for part in task.next_batch())
        with Operations() as seen, forward_precision(config.precision, GPU):
            loss = task.loss(built, batch)
        assert (loss.dtype, loss.device.type, loss.requires_grad) == (torch.float32, "cuda", True)
        assert {weight.dtype for weight in built.parameters()} == {torch.float32}
    return seen, started


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_bfloat16_reaches_products_and_the_fused_attention_of_every_layer(text, config, changed, model):
    seen, _ = forward(text, config, changed, model)
    assert seen.dtypes(FUSED) == [("bfloat16",) * 3] * model.num_layers
    products = [dtypes for name in ("mm", "addmm", "bmm") for dtypes in seen.dtypes(name)]
    assert products
    assert {dtype for dtypes in products for dtype in dtypes} == {"bfloat16"}
    assert "softmax" not in " ".join(name for name, _ in seen.seen)


def test_llama_has_its_norms_rotations_gates_and_losses_fused(text, config, changed):
    pytest.importorskip("attn_kernels_triton")
    _, started = forward(text, config, changed, LLAMA)
    assert started.count("rotate_rows") == 2 * LLAMA.num_layers
    assert started.count("norm_rows") == 2 * LLAMA.num_layers + 1
    assert started.count("gate_rows") == LLAMA.num_layers
    assert started.count("judge_rows") == 1


def test_float32_stays_float32(text, config, changed):
    seen, _ = forward(text, config, changed, GPT2, "float32")
    assert "bfloat16" not in {dtype for _, dtypes in seen.seen for dtype in dtypes}
    assert seen.dtypes(FUSED) == []


def test_nothing_in_a_forward_pass_waits_for_the_device(text, config, changed):
    # A tensor without numbers raises where a number is read.
    seen, _ = forward(text, config, changed, GPT2)
    names = {name for name, _ in seen.seen}
    assert not names & {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"}


def test_precisions_are_autocast_on_a_gpu_and_products_of_linear_layers_on_a_cpu():
    rows, weight = torch.randn(3, 4), torch.randn(5, 4)
    for where in (forward_precision, validation_precision):
        with fake_gpu(), where("bfloat16", GPU):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
        with where("float32", GPU):
            assert not torch.is_autocast_enabled("cuda")
    with forward_precision("bfloat16", torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")
        assert not torch.equal(torch.nn.functional.linear(rows, weight), rows @ weight.T)
    with validation_precision("bfloat16", torch.device("cpu")):
        torch.testing.assert_close(torch.nn.functional.linear(rows, weight), rows @ weight.T)


@pytest.mark.parametrize(
    ("option", "model", "allowed"),
    [
        ("torch_compile", ModelConfig(family="lstmn_lm", hidden_size=16, max_seq_len=8), "no blocks that support it"),
        ("gradient_checkpointing", GPT2.replace(num_experts=4, num_experts_per_tok=1), "experts"),
    ],
)
def test_options_of_blocks_are_refused_where_there_are_none_that_fit(config, changed, tmp_path, option, model, allowed):
    with pytest.raises(InvalidValue, match=allowed) as raised:
        check_model(changed(config, model=model, **{option: True}), tmp_path)
    assert raised.value.metadata["field"] == f"config.{option}"
