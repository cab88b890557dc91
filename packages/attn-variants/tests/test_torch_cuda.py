"""torch's fused attention on a GPU: by stand-ins for its operators, and on tensors of a GPU that have no numbers."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window, installed
from attn_core.distributions import SoftmaxWithSink, Sparsemax
from attn_core.kernels import dispatch
from attn_core.kernels.attend import AttendProblem, attend_problem
from attn_core.kernels.dispatch import explain
from attn_core.masks import BigBird, Prefix, Segments
from attn_core.modifiers import Alibi, SoftCap
from attn_variants.attention.kernels import AttentionKernels
from attn_variants.compute import torch_flex, warm_up
from attn_variants.compute.plain import attend as plain
from attn_variants.functional import attend
from attn_variants.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash, TorchFlex
from fake_gpu import Operations, fake_gpu
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

FUSED = [TorchFlash(), TorchCudnn(), TorchEfficient()]
OPERATORS = {
    "torch_flash": "_scaled_dot_product_flash_attention",
    "torch_cudnn": "_scaled_dot_product_cudnn_attention",
    "torch_efficient": "_efficient_attention_forward",
}


def weighted(query, key, value, bias, scale):
    """softmax(scale QKᵀ + bias) V over [batch, heads, row, size], as these operators define it: 0 / 0 is NaN."""
    group = query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(group, dim=1) for rows in (key, value))
    return torch.softmax(scale * query @ key.mT + bias, -1) @ value


def hidden(query, key, *, lower_right):
    """-inf where a causal mask, aligned to the first or to the last key, hides a key."""
    queries, keys = query.shape[2], key.shape[2]
    seen = torch.ones(queries, keys).tril(keys - queries if lower_right else 0).bool()
    return torch.zeros(queries, keys, dtype=query.dtype).masked_fill(~seen, -torch.inf)


def full_answer(out):
    """An output, and what goes with it, which nobody reads."""
    return (out, *[out.new_zeros(1)] * 3, 0, 0, *[out.new_zeros(1)] * 3)


@pytest.fixture(scope="module")
def operators():
    """On the CPU, what the documentation of torch says that these operators compute, with what they demand."""
    library = torch.library.Library("aten", "IMPL")

    def flash(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert query.shape[-1] == key.shape[-1] == value.shape[-1]
        assert query.shape[-1] % 8 == 0
        bias = hidden(query, key, lower_right=True) if causal else 0
        return full_answer(weighted(query, key, value, bias, scale))

    def cudnn(query, key, value, bias, lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        assert bias is None
        bias = hidden(query, key, lower_right=False) if causal else 0
        return full_answer(weighted(query, key, value, bias, scale))

    def efficient(query, key, value, bias, lse, dropout=0.0, causal=False, *, scale=None):
        assert query.shape[1] == key.shape[1]
        assert {rows.shape[-1] % 8 for rows in (query, key, value)} == {0}
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.shape[2])
            assert all(step % 16 == 0 for size, step in zip(bias.shape[:3], bias.stride(), strict=False) if size > 1)
        found = weighted(query, key, value, 0 if bias is None else bias, scale)
        return found, *[query.new_zeros(1)] * 3

    def banded(query, key, value, bias, *lengths_and_mask, scale=None, **_):
        query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
        custom_mask_type = lengths_and_mask[5]
        assert query.shape[1] == key.shape[1]
        assert bias is None
        bias = hidden(query, key, lower_right=True) if custom_mask_type == 2 else 0
        return weighted(query, key, value, bias, scale).transpose(1, 2), *[query.new_zeros(1)] * 3, 0, 0

    for name, stand_in in [
        ("_scaled_dot_product_flash_attention", flash),
        ("_scaled_dot_product_cudnn_attention", cudnn),
        ("_scaled_dot_product_efficient_attention", efficient),
        ("_efficient_attention_forward", banded),
    ]:
        library.impl(name, stand_in, "CPU")
    yield
    library._destroy()


def operands_of(heads, queries, keys, **more):
    return AttentionInputs(
        query=torch.randn(2, queries, heads.query, heads.key_size),
        key=torch.randn(2, keys, heads.key_value, heads.key_size),
        value=torch.randn(2, keys, heads.key_value, heads.value_size),
        **more,
    )


def heads_of(query=4, key_value=2, size=8, value_size=None):
    return Heads(query=query, key_value=key_value, key_size=size, value_size=value_size or size)


def equals_the_definition(kernel, spec, operands):
    with torch.no_grad():
        torch.testing.assert_close(kernel.run(spec, operands), plain(spec, operands), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("lengths", [(7, 7), (3, 9), (1, 6), (6, 2), (4, 0), (0, 4)], ids=str)
def test_full_and_causal_attention_equal_the_definition(operators, kernel, lengths):
    for mask, key_value, size in itertools.product([Full(), Causal()], [4, 2, 1], [8, 12]):
        if size == 12 and kernel.name == "torch_cudnn":
            continue
        spec = AttentionSpec(heads=heads_of(4, key_value, size), mask=mask)
        equals_the_definition(kernel, spec, operands_of(spec.heads, *lengths))


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(left=2), Prefix(2) | Causal(), ~Causal()], ids=str)
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (6, 2)], ids=str)
def test_any_mask_becomes_a_tensor_and_rows_without_a_key_are_zero(operators, mask, lengths):
    padding = torch.rand(2, lengths[1]) > 0.4
    padding[1] = False
    for modifiers, padded, value_size in itertools.product([(), (Alibi(),)], [None, padding], [8, 5]):
        spec = AttentionSpec(heads=heads_of(4, 2, 8, value_size), mask=mask, modifiers=modifiers)
        operands = operands_of(spec.heads, *lengths, key_padding_mask=padded)
        equals_the_definition(TorchEfficient(), spec, operands)


@pytest.mark.parametrize("mask", [Full(), Causal(), ~Causal()], ids=str)
def test_sinks_take_their_share_also_of_queries_that_see_nothing(operators, mask):
    spec = AttentionSpec(heads=heads_of(), mask=mask, distribution=SoftmaxWithSink())
    operands = operands_of(spec.heads, 5, 5, parameters={"distribution.logit": torch.randn(4)})
    equals_the_definition(TorchEfficient(), spec, operands)


def test_keys_at_given_positions_may_stand_in_any_order(operators):
    spec = AttentionSpec(heads=heads_of(), mask=Window(left=3))
    operands = operands_of(spec.heads, 4, 9)
    order = torch.randperm(9)
    moved = dataclasses.replace(
        operands,
        key=operands.key[:, order],
        value=operands.value[:, order],
        query_positions=torch.arange(5, 9).expand(2, 4),
        key_positions=order.expand(2, 9),
    )
    equals_the_definition(TorchEfficient(), spec, moved)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(left=5),
        Prefix(20) | Causal(),
        Causal() & Segments((10, 20, 10)),
        BigBird(block=4, random=1, number_of_heads=4),
    ],
    ids=str,
)
def test_flex_attention_is_told_the_same_mask_and_modifiers(monkeypatch, mask):
    # Uncompiled it computes all pairs, by the same rules.
    monkeypatch.setattr(torch_flex, "compiled", lambda: flex_attention)
    for modifiers, lengths in itertools.product([(), (SoftCap(cap=2.0), Alibi())], [(40, 40), (30, 40)]):
        spec = AttentionSpec(heads=heads_of(4, 2, 16), mask=mask, modifiers=modifiers)
        equals_the_definition(TorchFlex(), spec, operands_of(spec.heads, *lengths))


def test_what_the_compiler_cannot_compile_is_left_to_the_next_kernel():
    assert (
        TorchFlex().unsupported(torch._dynamo.exc.Unsupported("a branch on data\nmore"))
        == "Unsupported: a branch on data"
    )
    assert TorchFlex().unsupported(torch.OutOfMemoryError("CUDA out of memory")) is None


@pytest.mark.parametrize(
    ("kernel", "fields", "named"),
    [
        (TorchFlash(), {"dtype": "float32"}, "dtype"),
        (TorchFlash(), {"padded": True}, "padded"),
        (TorchFlash(), {"mask": "window"}, "mask"),
        (TorchFlash(), {"value_size": 128}, "value_size"),
        (TorchCudnn(), {"key_size": 60, "value_size": 60}, "key_size"),
        (TorchCudnn(), {"distribution": "sink"}, "distribution"),
        (TorchCudnn(), {"device": "cpu"}, "device"),
        (TorchEfficient(), {"modifiers": ("soft_cap",)}, "modifiers"),
        (TorchEfficient(), {"dropout": True}, "dropout"),
        (TorchEfficient(), {"dtype": "float64"}, "dtype"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_by_name(kernel, fields, named):
    problem = AttendProblem(**{"key_size": 64, "value_size": 64, "dtype": "bfloat16", "device": "cuda"} | fields)
    assert [reason.partition(":")[0] for reason in kernel.refusals(problem)] == [named]


def rows_on_gpu(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def calls_of(operations):
    return [name for name, _ in operations.seen if "attention" in name]


@pytest.mark.parametrize("kernel", FUSED, ids=lambda kernel: kernel.name)
def test_each_is_one_operation_of_torch_on_a_gpu(kernel):
    with fake_gpu(), Operations() as seen:
        spec = AttentionSpec(heads=heads_of(4, 2, 64), mask=Causal())
        query, key, value = (rows_on_gpu(2, 128, heads, 64) for heads in (4, 2, 2))
        out = AttentionKernels(spec, kernel.name).run(AttentionInputs(query=query, key=key, value=value))
    assert calls_of(seen) == [OPERATORS[kernel.name]]
    assert (out.shape, out.dtype, out.device.type) == ((2, 128, 4, 64), torch.bfloat16, "cuda")


@pytest.mark.parametrize("keys", [128, 4096])
def test_causal_attention_in_16_bits_is_fused_and_never_plain_on_a_gpu(keys):
    with fake_gpu() as started, Operations() as seen:
        query, key, value = (rows_on_gpu(1, heads, keys, 64) for heads in (8, 4, 4))
        out = attend(query, key, value, is_causal=True, enable_gqa=True)
    assert out.shape == (1, 8, keys, 64)
    assert len(calls_of(seen)) + len(started) == 1
    assert "softmax" not in " ".join(name for name, _ in seen.seen)


def test_autocast_gives_kernels_16_bits_and_leaves_float64_alone():
    with fake_gpu(), Operations() as seen, torch.autocast("cuda", dtype=torch.bfloat16):
        spec = AttentionSpec(heads=heads_of(4, 4, 64), mask=Causal())
        query, key, value = (rows_on_gpu(2, 128, 4, 64, dtype=torch.float32) for _ in range(3))
        out = AttentionKernels(spec, "torch_cudnn").run(AttentionInputs(query=query, key=key, value=value))
    assert out.dtype == torch.bfloat16
    assert seen.dtypes(OPERATORS["torch_cudnn"]) == [("bfloat16",) * 3]
    exact = [torch.randn(1, 2, 4, 8, dtype=torch.float64) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*exact).dtype == torch.float64


def test_autocast_on_a_cpu_computes_as_if_operands_had_been_given_in_16_bits():
    rows = [torch.randn(1, 2, 6, 8) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(*rows, is_causal=True)
    assert torch.equal(found, attend(*(part.bfloat16() for part in rows), is_causal=True))


def test_a_kernel_that_the_chip_lacks_is_replaced_by_the_next_and_the_log_says_it_once(monkeypatch, caplog):
    def missing(*_args):
        raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.\nmore")

    tried = []
    monkeypatch.setattr(TorchCudnn, "cost", lambda self, problem: 0.0)
    monkeypatch.setattr(TorchFlash, "cost", lambda self, problem: 0.001)
    monkeypatch.setattr(TorchCudnn, "run", lambda self, *given: tried.append(given) or missing())
    monkeypatch.setattr(dispatch, "_said", set())
    with fake_gpu(), Operations() as seen, caplog.at_level(logging.WARNING):
        plan = AttentionKernels(AttentionSpec(heads=heads_of(4, 4, 64)))
        inputs = AttentionInputs(**{name: rows_on_gpu(1, 64, 4, 64) for name in ("query", "key", "value")})
        plan.run(inputs)
        plan.run(inputs)
        with pytest.raises(RuntimeError, match="No valid execution plans"):
            AttentionKernels(plan.spec, "torch_cudnn").run(inputs)
    assert len(tried) == 2
    assert calls_of(seen) == [OPERATORS["torch_flash"]] * 2
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "torch_cudnn" in said[0]
    assert "more" not in said[0]


class FlashWithoutGradients(torch.autograd.Function):
    """Attention whose backward pass the chip lacks."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx, query, key, value):
        FlashWithoutGradients.calls.append("forward")
        ctx.save_for_backward(query, key, value)
        return value * 1

    @staticmethod
    def backward(ctx, change):
        FlashWithoutGradients.calls.append("backward")
        raise RuntimeError("No available kernel. Aborting execution.")


@pytest.fixture
def without_gradients(monkeypatch):
    """`TorchFlash` on a CPU, first of all, without a backward pass; gives what was called of it."""
    monkeypatch.setattr(TorchFlash, "available", lambda self: None)
    monkeypatch.setattr(TorchFlash, "refusals", lambda self, problem: [])
    monkeypatch.setattr(TorchFlash, "cost", lambda self, problem: 0.0)
    monkeypatch.setattr(
        TorchFlash,
        "compute",
        lambda self, spec, given: FlashWithoutGradients.apply(given.query, given.key, given.value),
    )
    monkeypatch.setattr(FlashWithoutGradients, "calls", [])
    monkeypatch.setattr(dispatch, "_said", set())
    monkeypatch.setattr(warm_up, "_warm", set())
    return lambda: FlashWithoutGradients.calls


def learned(plan, operands):
    """The gradients to queries, keys and values, in float64."""
    leaves = {name: getattr(operands, name).clone().requires_grad_() for name in ("query", "key", "value")}
    out = plan.run(dataclasses.replace(operands, **leaves))
    return [part.double() for part in torch.autograd.grad(out.square().sum(), list(leaves.values()))]


@pytest.mark.parametrize("checkpointed", [False, True], ids=["whole", "checkpointed"])
def test_a_backward_pass_that_the_chip_lacks_is_found_in_the_forward_pass(without_gradients, caplog, checkpointed):
    spec = AttentionSpec(heads=heads_of(4, 2, 8), mask=Causal())
    operands = operands_of(spec.heads, 6, 6)
    exact = dataclasses.replace(
        operands, **{name: getattr(operands, name).double() for name in ("query", "key", "value")}
    )
    expected = learned(AttentionKernels(spec, "plain"), exact)
    plan = AttentionKernels(spec)
    if checkpointed:
        run, plan = plan.run, SimpleNamespace()
        plan.run = lambda given: checkpoint(run, given, use_reentrant=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(learned(plan, operands), expected, rtol=1e-4, atol=1e-5)
    assert without_gradients() == ["forward", "backward"]
    assert [record.getMessage().split()[1] for record in caplog.records] == ["torch_flash"]


def test_one_asked_for_by_name_is_not_replaced_and_raises_before_anything_depends_on_it(without_gradients):
    spec = AttentionSpec(heads=heads_of(4, 2, 8))
    operands = operands_of(spec.heads, 6, 6)
    plan = AttentionKernels(spec, "torch_flash")
    assert plan.run(operands).shape == operands.value.shape
    with torch.no_grad():
        plan.run(dataclasses.replace(operands, query=operands.query.clone().requires_grad_()))
    assert without_gradients() == ["forward"] * 2
    with pytest.raises(RuntimeError, match="No available kernel"):
        plan.run(dataclasses.replace(operands, query=operands.query.clone().requires_grad_()))


def test_a_backward_pass_runs_before_the_first_call_of_a_kind_alone(monkeypatch):
    computed = []
    monkeypatch.setattr(warm_up, "_warm", set())
    rows = torch.ones(1, 2, 1, 4, requires_grad=True)
    operands = AttentionInputs(query=rows, key=rows, value=rows)

    def compute(given):
        computed.append(given)
        return given.query * given.value

    for kind in ("one", "one", "another"):
        warm_up.warm_up_backward((kind,), compute, operands)
    assert len(computed) == 2
    assert rows.grad is None
    assert all(given.query is not rows for given in computed)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no available kernel"), ValueError("no available kernel")])
def test_other_errors_of_a_kernel_are_raised(monkeypatch, error):
    def raising(*_args):
        raise error

    monkeypatch.setattr(TorchCudnn, "cost", lambda self, problem: 0.0)
    monkeypatch.setattr(TorchCudnn, "run", raising)
    with fake_gpu():
        inputs = AttentionInputs(**{name: rows_on_gpu(1, 64, 4, 64) for name in ("query", "key", "value")})
        plan = AttentionKernels(AttentionSpec(heads=heads_of(4, 4, 64)))
        with pytest.raises(type(error)):
            plan.run(inputs)


def plain_calls(caplog, keys, distribution, kernel=None):
    rows = torch.randn(1, 1, 2, 8), torch.randn(1, 1, keys, 8), torch.randn(1, 1, keys, 8)
    with caplog.at_level(logging.WARNING):
        attend(*rows, distribution=distribution, kernel=kernel)
        attend(*rows, distribution=distribution, kernel=kernel)
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("the plain kernel")]


def test_plain_says_once_that_it_computes_over_more_than_1024_keys(monkeypatch, caplog):
    from attn_variants.functional import cached_kernels

    monkeypatch.setattr(dispatch, "_said", set())
    cached_kernels.cache_clear()
    assert plain_calls(caplog, 1024, Sparsemax()) == []
    warnings = plain_calls(caplog, 1025, Sparsemax())
    assert len(warnings) == 1
    assert "1024 keys" in warnings[0]
    assert "sparsemax" in warnings[0]


def test_plain_says_nothing_where_it_was_asked_for_by_name(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "_said", set())
    assert plain_calls(caplog, 1100, None, kernel="plain") == []


def test_explain_says_it_too():
    spec = AttentionSpec(heads=heads_of(4, 4, 64), modifiers=(SoftCap(cap=5.0),), distribution=Sparsemax())
    for keys, remarked in ((1024, False), (1025, True)):
        known = {"dtype": "bfloat16", "device": "cuda", "gradients": False, "padded": False}
        problem = attend_problem(spec, **known, queries=keys, keys=keys)
        verdicts = explain([k for k in installed().kernels if k.operation == "attend"], problem)
        assert verdicts[0].kernel.name == "plain"
        assert (verdicts[0].remark is not None) == remarked
