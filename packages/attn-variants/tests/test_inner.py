"""What lies between the projections and the output of a spec, as a mechanism of its own sees it."""

import pytest
import torch
from attn_core import (
    AttentionInputs,
    AttentionSpec,
    Capability,
    Causal,
    DeclaredMechanism,
    Heads,
    InnerAttention,
    Paper,
    Window,
    configure,
)
from attn_core.errors import Incompatible
from attn_core.masking import allowed_pairs, of_query_heads, positions, shares, wide
from attn_testing import DictionaryStore, MechanismLaws


class Scaled(InnerAttention, torch.nn.Module):
    """Twice the spec's attention, and what each token remembers besides its key."""

    def __init__(self, width):
        super().__init__()
        self.mark = torch.nn.Linear(width, 1)

    def remember(self, rows, positions):
        return {"mark": self.mark(rows)}

    def forward(self, rows, operands, attend):
        assert operands.fields["mark"].shape[:2] == operands.key.shape[:2]
        marked = AttentionInputs(
            query=operands.query,
            key=operands.key,
            value=operands.value * operands.fields["mark"][..., None],
            query_positions=operands.query_positions,
            key_positions=operands.key_positions,
            key_padding_mask=operands.key_padding_mask,
            parameters=operands.parameters,
        )
        return 2 * attend(marked)


class Marked(DeclaredMechanism):
    name = "marked"
    summary = "values times a mark that each token remembers"
    paper = Paper(title="None", authors="Nobody", year=2000)
    equation = "2 A (m V)"
    capabilities = frozenset(Capability) - {
        Capability.CROSS,
        Capability.SHARES_KV,
        Capability.WEIGHTS,
        Capability.NORMALISED,
    }

    def spec(self, config):
        return AttentionSpec(
            heads=config.head_layout,
            mask=Causal() if config.causal else Window(left=None, right=None),
            rotary=config.rotary,
        )

    def inner(self, config):
        return Scaled(config.hidden_size)

    def further_fields(self, config):
        from attn_core import Field

        return {"mark": Field((1,))}

    def cost(self, config, shape):
        from attn_core import Cost

        flops = 2 * shape.batch * shape.query * config.hidden_size
        return super().cost(config, shape) + Cost(flops=flops, allowed_flops=flops, parameters=config.hidden_size + 1)


class TestMarked(MechanismLaws):
    mechanism = Marked()


def test_weights_are_refused_where_the_inner_module_has_none():
    layer = Marked().build(configure(Marked(), hidden_size=8, num_heads=2))
    with pytest.raises(Incompatible, match="Scaled has no attention weights"):
        layer.weights(torch.randn(1, 3, 8))


def test_the_further_field_is_part_of_the_state():
    state = Marked().state(configure(Marked(), hidden_size=8, num_heads=2))
    assert set(state["kv"].fields) == {"key", "value", "mark"}
    assert DictionaryStore({"layer": state}).specs["layer"] == state


def operands(queries, keys, **others):
    return AttentionInputs(
        query=torch.zeros(1, queries, 2, 3), key=torch.zeros(1, keys, 1, 3), value=torch.zeros(1, keys, 1, 3), **others
    )


def test_queries_stand_at_the_end_of_the_keys_unless_they_say_where():
    query, key = positions(operands(2, 5))
    assert query.tolist() == [[3, 4]]
    assert key.tolist() == [[0, 1, 2, 3, 4]]
    given = operands(2, 5, query_positions=torch.tensor([[7, 9]]))
    assert positions(given)[0].tolist() == [[7, 9]]


def test_a_pair_is_allowed_by_the_mask_and_by_what_is_real():
    kept = operands(2, 3, key_padding_mask=torch.tensor([[True, False, True]]))
    assert allowed_pairs(Causal(), kept)[0, 0].tolist() == [[True, False, False], [True, False, True]]


def test_query_heads_read_the_head_of_their_group():
    rows = torch.arange(2.0).view(1, 2, 1)
    regular = Heads(query=4, key_value=2, key_size=1, value_size=1)
    irregular = Heads(query=3, key_value=2, key_size=1, value_size=1, groups=(1, 0, 1))
    assert of_query_heads(regular, rows).flatten().tolist() == [0, 0, 1, 1]
    assert of_query_heads(irregular, rows).flatten().tolist() == [1, 0, 1]


def test_shares_are_a_softmax_of_what_is_allowed_and_zero_without_gradient_elsewhere():
    scores = torch.tensor([[1.0, 5000.0, 2.0], [1.0, 2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    found = shares(scores, torch.tensor([[True, False, True], [False] * 3]))
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64).softmax(0)
    assert torch.allclose(found[0, [0, 2]], expected, rtol=0, atol=1e-15)
    assert found[0, 1] == 0
    assert (found[1] == 0).all()
    (found * torch.randn(2, 3)).sum().backward()
    assert scores.grad.isfinite().all()
    assert (scores.grad[1] == 0).all()


@pytest.mark.parametrize(
    ("given", "expected"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")]
)
def test_few_bits_are_widened(given, expected):
    assert wide(torch.zeros(1, dtype=getattr(torch, given))).dtype == getattr(torch, expected)
