"""Kernels against torch's own attention in float64, and against what they say of themselves."""

import dataclasses
import itertools

import pytest
import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window, installed
from attn_core.distributions import Sparsemax
from attn_core.errors import KernelRefused, UnknownName
from attn_core.kernels.attend import attend_problem
from attn_core.kernels.dispatch import choose
from attn_core.masks import Prefix
from attn_core.modifiers import Alibi, ScoreFunction, SoftCap
from attn_core.scores import Additive, ScaledDot
from attn_variants.attention.kernels import AttentionKernels
from attn_variants.kernels.attend import Plain, TorchSdpa
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

KERNELS = [Plain(), TorchSdpa()]
MASKS = [Full(), Causal(), Window(left=2), Window(left=1, right=2, dilation=2), Prefix(2) | Causal(), ~Causal()]
HEADS = [(4, 4), (4, 2), (4, 1), (1, 1)]
LENGTHS = [(5, 5), (3, 7), (1, 6), (6, 2)]


def heads_of(query, key_value, key_size=8, value_size=8):
    return Heads(query=query, key_value=key_value, key_size=key_size, value_size=value_size)


def random_operands(heads, queries, keys, dtype=torch.float64, **more):
    return AttentionInputs(
        query=torch.randn(2, queries, heads.query, heads.key_size, dtype=dtype),
        key=torch.randn(2, keys, heads.key_value, heads.key_size, dtype=dtype),
        value=torch.randn(2, keys, heads.key_value, heads.value_size, dtype=dtype),
        **more,
    )


def by_loops(spec, operands):
    """The softmax family one query and head at a time, from its definition."""
    batch, queries, heads, _ = operands.query.shape
    keys = operands.key.shape[1]
    out = operands.value.new_zeros(batch, queries, heads, operands.value.shape[-1])
    for b, i, h in itertools.product(range(batch), range(queries), range(heads)):
        place = keys - queries + i
        group = spec.heads.group_of[h]
        seen = [j for j in range(keys) if bool(spec.mask.allows(place, j))]
        if operands.key_padding_mask is not None:
            seen = [j for j in seen if operands.key_padding_mask[b, j]]
        if not seen:
            continue
        scores = operands.key[b, seen, group] @ operands.query[b, i, h] * spec.heads.key_size**-0.5
        if spec.modifiers:
            scores -= 2.0 ** (-8 * (h + 1) / heads) * torch.tensor([abs(place - j) for j in seen])
        out[b, i, h] = torch.softmax(scores, 0) @ operands.value[b, seen, group]
    return out


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("counts", HEADS, ids=str)
def test_every_mask_equals_the_definition(kernel, lengths, counts):
    for mask, modifiers, padded in itertools.product(MASKS, [(), (Alibi(),)], [False, True]):
        spec = AttentionSpec(heads=heads_of(*counts), mask=mask, modifiers=modifiers)
        operands = random_operands(spec.heads, *lengths)
        if padded:
            key_padding_mask = torch.rand(2, lengths[1]) > 0.4
            key_padding_mask[1] = False
            operands = dataclasses.replace(operands, key_padding_mask=key_padding_mask)
        assert torch.allclose(kernel.run(spec, operands), by_loops(spec, operands), rtol=0, atol=1e-12), (
            mask,
            modifiers,
        )


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("lengths", [(4, 4), (3, 9), (1, 9)], ids=str)
def test_causal_attention_is_aligned_to_the_last_key(kernel, lengths):
    spec = AttentionSpec(heads=heads_of(2, 2), mask=Causal())
    operands = random_operands(spec.heads, *lengths)
    query, key, value = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=causal_lower_right(*lengths)._materialize("cpu")
    )
    assert torch.allclose(kernel.run(spec, operands), expected.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_given_positions_decide_and_the_order_of_keys_does_not(kernel):
    spec = AttentionSpec(heads=heads_of(4, 2), mask=Window(left=3), modifiers=(Alibi(),))
    operands = random_operands(spec.heads, 4, 9)
    expected = kernel.run(spec, operands)
    order = torch.randperm(9)
    shuffled = dataclasses.replace(
        operands,
        key=operands.key[:, order],
        value=operands.value[:, order],
        query_positions=torch.arange(5, 9).expand(2, 4),
        key_positions=order.expand(2, 9),
    )
    assert torch.allclose(kernel.run(spec, shuffled), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_keys_and_values_may_differ_in_size_and_the_scale_may_be_given(kernel):
    spec = AttentionSpec(heads=heads_of(4, 2, key_size=8, value_size=5), score=ScaledDot(scale=0.7))
    operands = random_operands(spec.heads, 3, 6)
    query, key, value = (rows.transpose(1, 2) for rows in (operands.query, operands.key, operands.value))
    expected = scaled_dot_product_attention(query, key, value, scale=0.7, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(kernel.run(spec, operands), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_without_any_key_the_output_is_zero(kernel):
    spec = AttentionSpec(heads=heads_of(2, 1))
    out = kernel.run(spec, random_operands(spec.heads, 3, 0))
    assert torch.equal(out, torch.zeros(2, 3, 2, 8, dtype=torch.float64))


@pytest.mark.parametrize("modifiers", [(), (Alibi(),)], ids=["bool", "biases"])
def test_both_kernels_have_the_same_gradients_also_where_rows_have_no_key(modifiers):
    spec = AttentionSpec(heads=heads_of(4, 2), mask=Causal(), modifiers=modifiers)
    key_padding_mask = torch.tensor([[False, True, True, False, True], [False] * 5])
    operands = random_operands(spec.heads, 5, 5, key_padding_mask=key_padding_mask)
    upstream = torch.randn(2, 5, 4, 8, dtype=torch.float64)
    found = []
    for kernel in KERNELS:
        inputs = [rows.clone().requires_grad_() for rows in (operands.query, operands.key, operands.value)]
        out = kernel.run(spec, dataclasses.replace(operands, query=inputs[0], key=inputs[1], value=inputs[2]))
        found.append(torch.autograd.grad((out * upstream).sum(), inputs))
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        assert torch.equal(ours[1], torch.zeros_like(ours[1]))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [1, 24])
def test_sixteen_bits_lose_no_more_than_rounding_inputs_and_weights(kernel, dtype, queries):
    spec = AttentionSpec(heads=heads_of(4, 4, key_size=32, value_size=32), mask=Causal())
    operands = random_operands(spec.heads, queries, 24, dtype=dtype)
    exact = by_loops(
        spec, AttentionInputs(query=operands.query.double(), key=operands.key.double(), value=operands.value.double())
    )
    out = kernel.run(spec, operands)
    error = (out.double() - exact).norm() / exact.norm()
    assert out.dtype == dtype
    assert error < 2 * torch.finfo(dtype).eps


def test_more_hidden_units_than_fit_are_scored_in_pieces(monkeypatch):
    from attn_variants import scores as additive
    from attn_variants.attention.projections import init_weights

    spec = AttentionSpec(heads=heads_of(4, 2), score=Additive(intermediate_size=6), mask=Causal())
    parameters = {f"score.{name}": weight.double() for name, weight in init_weights(spec.score, spec.heads).items()}
    operands = random_operands(spec.heads, 7, 7, parameters=parameters)
    with torch.no_grad():
        whole = Plain().run(spec, operands)
        monkeypatch.setattr(additive, "PIECE", 2 * 4 * 7 * 6 * 2)
        assert torch.allclose(Plain().run(spec, operands), whole, rtol=0, atol=1e-14)


def test_soft_capped_scores_stay_below_the_cap():
    spec = AttentionSpec(heads=heads_of(1, 1), modifiers=(SoftCap(cap=1.5),))
    operands = random_operands(spec.heads, 4, 6)
    energies = torch.einsum("bqhd,bkhd->bhqk", operands.query, operands.key) * 8**-0.5
    expected = torch.softmax(1.5 * torch.tanh(energies / 1.5), -1)
    out = torch.einsum("bhqk,bkhd->bqhd", expected, operands.value)
    assert torch.allclose(Plain().run(spec, operands), out, rtol=0, atol=1e-14)


def problem(gradients=False, padded=False, **spec):
    heads = spec.pop("heads", heads_of(4, 2))
    found = AttentionSpec(heads=heads, **spec)
    return attend_problem(found, dtype="float32", device="cpu", gradients=gradients, padded=padded)


REFUSED = {
    "score": problem(score=Additive()),
    "modifiers": problem(modifiers=(SoftCap(cap=30.0),)),
    "distribution": problem(distribution=Sparsemax()),
    "irregular_groups": problem(heads=dataclasses.replace(heads_of(4, 2), groups=(0, 1, 0, 1))),
    "device": dataclasses.replace(problem(), device="tpu"),
    "weights": dataclasses.replace(problem(), weights=True),
    "dtype": dataclasses.replace(problem(), dtype="float8_e4m3fn"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_the_fused_kernel_refuses_what_it_cannot_do_and_the_plain_one_is_chosen(field):
    reasons = TorchSdpa().refusals(REFUSED[field])
    assert [reason.partition(":")[0] for reason in reasons] == [field]
    assert Plain().refusals(REFUSED[field]) == []
    assert choose(installed().kernels, REFUSED[field]).name == "plain"


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_the_fused_kernel_is_chosen_where_it_can(mask):
    for gradients, padded in itertools.product([False, True], repeat=2):
        assert choose(installed().kernels, problem(mask=mask, gradients=gradients, padded=padded)).name == "torch_sdpa"


def test_a_kernel_asked_for_by_name_that_refuses_raises_and_says_why():
    spec = AttentionSpec(heads=heads_of(2, 2), modifiers=(ScoreFunction(lambda score, head, query, key: score),))
    with pytest.raises(KernelRefused, match=r"torch_sdpa.*modifiers"):
        AttentionKernels(spec, "torch_sdpa").run(random_operands(spec.heads, 3, 3))


def test_an_unknown_kernel_is_refused_with_near_names():
    spec = AttentionSpec(heads=heads_of(2, 2))
    with pytest.raises(UnknownName, match="torch_sdpa"):
        AttentionKernels(spec, "torch_spda").run(random_operands(spec.heads, 3, 3))


def test_heads_may_read_keys_in_any_order():
    groups = (1, 0, 1, 0)
    spec = AttentionSpec(heads=dataclasses.replace(heads_of(4, 2), groups=groups))
    operands = random_operands(spec.heads, 3, 5)
    single = AttentionSpec(heads=heads_of(1, 1))
    by_head = []
    for head, group in enumerate(groups):
        key, value = operands.key[:, :, [group]], operands.value[:, :, [group]]
        by_head.append(by_loops(single, AttentionInputs(query=operands.query[:, :, [head]], key=key, value=value)))
    assert torch.allclose(AttentionKernels(spec).run(operands), torch.cat(by_head, dim=2), rtol=0, atol=1e-12)
