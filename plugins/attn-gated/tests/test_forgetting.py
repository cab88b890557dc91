import math
import runpy
from importlib.metadata import distribution

import attn_gated.forgetting
import pytest
import torch
from attn_core import configure, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_testing import Agreement
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [one for one in (out if isinstance(out, tuple | list) else [out]) if isinstance(one, torch.Tensor)]
        self.elements = max([self.elements, *(one.numel() for one in made)])
        return out


FORGETTING = attn_gated.forgetting.Forgetting()


def build(**shared):
    torch.manual_seed(0)
    return FORGETTING.build(configure(FORGETTING, **shared)).double()


def by_loops(layer, rows, heads, groups, size):
    """The equations of the paper for rows [token, width]: gates multiply the exponential of every earlier score."""
    query = (rows @ layer.query.weight.T).view(-1, heads, size)
    key = (rows @ layer.key.weight.T).view(-1, groups, size)
    value = (rows @ layer.value.weight.T).view(-1, groups, size)
    gate = torch.sigmoid(rows @ layer.inner.gate.weight.T + layer.inner.gate.bias)
    out = []
    for token in range(len(rows)):
        for head in range(heads):
            mine, terms, kept = head // (heads // groups), [], torch.ones((), dtype=rows.dtype)
            for past in range(token, -1, -1):
                terms.append(kept * torch.exp(query[token, head] @ key[past, mine] / math.sqrt(size)))
                kept = kept * gate[past, head]
            total = sum(terms)
            out.append(sum(term / total * value[token - back, mine] for back, term in enumerate(terms)))
    return torch.stack(out).view(len(rows), -1) @ layer.output.weight.T


@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 2)])
def test_it_equals_a_loop_over_the_equations_forward_and_gradient(record_property, heads, groups):
    layer = build(hidden_size=8, num_heads=heads, num_kv_heads=groups, head_dim=3)
    rows = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    expected, out = by_loops(layer, rows, heads, groups, 3), layer(rows[None])[0]
    loops = Agreement(record_property, "forgetting", paper="the equations in loops")
    loops.outputs(out, expected, 1e-13)
    probe = torch.randn_like(out)
    wanted = [rows, layer.query.weight, layer.value.weight, layer.inner.gate.weight, layer.inner.gate.bias]
    ours, theirs = (torch.autograd.grad((made * probe).sum(), wanted) for made in (out, expected))
    loops.gradients(ours, theirs, 1e-12)


def test_gates_that_stay_open_forget_nothing():
    layer = build(hidden_size=8, num_heads=2)
    mha = installed().mechanisms.get("mha")
    plain = mha.build(configure(mha, hidden_size=8, num_heads=2)).double()
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "inner" not in name})
    with torch.no_grad():
        layer.inner.gate.bias.fill_(100.0)
    rows = torch.randn(2, 9, 8, dtype=torch.float64)
    assert torch.allclose(layer(rows), plain(rows), rtol=0, atol=1e-14)


def test_a_constant_gate_is_a_linear_bias_of_its_logarithm(record_property):
    layer = build(hidden_size=8, num_heads=2)
    alibi = installed().mechanisms.get("alibi")
    biased = alibi.build(configure(alibi, hidden_size=8, num_heads=2)).double()
    biased.load_state_dict({name: value for name, value in layer.state_dict().items() if "inner" not in name})
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # those of two heads
    with torch.no_grad():
        layer.inner.gate.weight.zero_()
        layer.inner.gate.bias.copy_(torch.logit(torch.exp(-slopes)))
    same = Agreement(record_property, "forgetting", identity="a constant gate is alibi")
    same.functions(layer, biased, torch.randn(2, 9, 8, dtype=torch.float64), tolerance=1e-12)


def test_a_closed_gate_hides_everything_before_it():
    layer = build(hidden_size=8, num_heads=2)
    rows = torch.randn(1, 6, 8, dtype=torch.float64)
    with torch.no_grad():
        layer.inner.gate.weight.copy_(torch.zeros(2, 8).index_fill(1, torch.tensor([0]), -1e4))
    rows[..., 0] = -1.0
    rows[0, 3, 0] = 1.0  # log f of the fourth token is -10000, of all others 0
    other = rows.clone()
    other[:, :3, 1:] = 7.0
    assert torch.equal(layer(rows)[:, 3:], layer(other)[:, 3:])


@pytest.mark.parametrize("bias", [0.0, -6.0], ids=["half", "closed"])
def test_sums_of_thousands_of_gates_leave_float32_outputs_as_near_as_few(bias):
    layer = build(hidden_size=16, num_heads=2)
    with torch.no_grad():
        layer.inner.gate.bias.fill_(bias)
    rows = torch.randn(1, 3000, 16, dtype=torch.float64)
    operands = layer._operands(rows, None, None)
    exact = layer.output(
        (layer.inner.weights(rows, operands, None) @ operands.value.transpose(1, 2))[0].transpose(0, 1).flatten(1)
    )
    assert torch.allclose(layer(rows)[0], exact, rtol=0, atol=1e-10)
    assert torch.allclose(layer.float()(rows.float())[0].double(), exact, rtol=0, atol=2e-6)


def test_padding_is_not_seen_and_a_query_with_no_key_gives_zeros_and_no_gradient():
    layer = build(hidden_size=8, num_heads=4, num_kv_heads=2)
    rows = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    key_padding_mask = torch.ones(2, 9, dtype=torch.bool)
    key_padding_mask[0, :4] = key_padding_mask[1, 6:] = False
    out = layer(rows, key_padding_mask=key_padding_mask)
    assert torch.allclose(out[0, 4:], layer(rows[:1, 4:])[0], rtol=0, atol=1e-13)
    assert torch.allclose(out[1, :6], layer(rows[1:, :6])[0], rtol=0, atol=1e-13)
    assert torch.equal(out[0, :4], torch.zeros(4, 8, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out[0].sum(), rows)
    assert torch.equal(gradient[0, :4], torch.zeros(4, 8, dtype=torch.float64))
    assert gradient.isfinite().all()


def test_no_tensor_of_a_long_sequence_has_all_pairs_forward_or_backward():
    layer = build(hidden_size=16, num_heads=2).float()
    rows = torch.randn(1, 1024, 16, requires_grad=True)
    with LargestTensor() as seen:
        layer(rows).sum().backward()
    assert seen.elements <= 1024 * 2 * 16


def test_a_token_remembers_one_gate_a_head_besides_its_key_and_value():
    state = FORGETTING.state(configure(FORGETTING, hidden_size=32, num_heads=4, num_kv_heads=2))
    assert state_bytes(state, tokens=10, dtype="bfloat16") == 10 * (2 * 2 * 8 * 2 + 4 * 4)


def test_it_refuses_to_look_ahead():
    with pytest.raises(InvalidValue, match="causal: False"):
        build(hidden_size=8, causal=False)


@pytest.mark.oracle
def test_it_equals_the_plain_function_of_fla_core_forward_and_gradient(record_property):
    path = distribution("fla-core").locate_file("fla/ops/forgetting_attn/naive.py")  # importing fla needs triton
    theirs = runpy.run_path(str(path))["naive_forgetting_attn"]
    layer = build(hidden_size=8, num_heads=4, num_kv_heads=2).float()

    def by_fla(rows):
        query = layer.query(rows).unflatten(-1, (4, 2))
        key, value = (linear(rows).unflatten(-1, (2, 2)) for linear in (layer.key, layer.value))
        gate = torch.nn.functional.logsigmoid(layer.inner.gate(rows))
        return layer.output(theirs(query, key, value, gate).flatten(-2))

    oracle = Agreement(record_property, "forgetting", package="fla-core naive_forgetting_attn")
    oracle.functions(layer, by_fla, torch.randn(2, 9, 8), tolerance=1e-5)
