"""State and price that follow from a spec."""

import dataclasses

import pytest

from attn_core import (
    AttentionSpec,
    Capability,
    Causal,
    Cost,
    DeclaredMechanism,
    Heads,
    MechanismConfig,
    Paged,
    Paper,
    Shape,
    Source,
    Step,
    Window,
)
from attn_core.errors import Incompatible, InvalidValue
from attn_core.scores import Additive, General


def declared(build_spec, *able):
    class Declared(DeclaredMechanism):
        name = "declared"
        summary = "for these tests"
        paper = Paper(title="None", authors="Nobody", year=2000)
        equation = "x"
        capabilities = frozenset(able)

        def spec(self, config):
            return build_spec(config)

    return Declared()


CONFIG = MechanismConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=3)


def test_keys_and_values_are_remembered_per_token():
    state = declared(lambda config: AttentionSpec(heads=config.head_layout, mask=Causal())).state(CONFIG)
    assert set(state) == {"kv"}
    assert isinstance(state["kv"], Paged)
    assert state["kv"].window is None
    assert {name: field.shape for name, field in state["kv"].fields.items()} == {"key": (2, 3), "value": (2, 3)}


def test_no_more_is_remembered_than_the_mask_can_look_back():
    mechanism = declared(lambda config: AttentionSpec(heads=config.head_layout, mask=Causal() & Window(left=4)))
    assert mechanism.state(CONFIG)["kv"].window == 5


def test_cross_attention_remembers_its_source():
    cross = dataclasses.replace(CONFIG, cross=True)
    state = declared(lambda config: AttentionSpec(heads=config.head_layout, cross=True)).state(cross)
    assert isinstance(state["source"], Source)
    assert set(state) == {"source"}


def products(*sizes):
    """FLOPs of matrix products given as (rows, inner, columns)."""
    return sum(2 * rows * inner * columns for rows, inner, columns in sizes)


def test_the_price_of_grouped_heads_is_that_of_their_matrix_products():
    mechanism = declared(lambda config: AttentionSpec(heads=config.head_layout, mask=Causal()))
    cost = mechanism.cost(CONFIG, Shape(batch=2, query=5, key=5))
    projections = [(5, 10, 12), (5, 10, 6), (5, 10, 6), (5, 12, 10)]
    pairs = [(5, 3, 5), (5, 5, 3)] * 4
    assert cost.flops == 2 * products(*projections, *pairs)
    assert cost.allowed_flops == 2 * (products(*projections) + 4 * 15 * 2 * (3 + 3))
    assert cost.parameters == 10 * 12 + 10 * 6 * 2 + 12 * 10


def test_biases_are_counted_as_parameters_and_cost_nothing():
    mechanism = declared(lambda config: AttentionSpec(heads=config.head_layout))
    plain = mechanism.cost(CONFIG, Shape(query=4, key=4))
    config = MechanismConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=3, bias=True)
    biased = mechanism.cost(config, Shape(query=4, key=4))
    assert biased.flops == plain.flops
    assert biased.parameters == plain.parameters + 12 + 6 + 6 + 10


def test_a_step_projects_the_new_tokens_only_and_of_a_source_nothing():
    own = declared(lambda config: AttentionSpec(heads=config.head_layout, mask=Causal()), Capability.INCREMENTAL)
    able = Capability.CROSS, Capability.INCREMENTAL
    cross = declared(lambda config: AttentionSpec(heads=config.head_layout, cross=True), *able)
    query_and_output, pairs = products((1, 10, 12), (1, 12, 10)), products(*[(1, 3, 7), (1, 7, 3)] * 4)
    assert own.cost(CONFIG, Step(new=1, remembered=6)).flops == query_and_output + products((1, 10, 12)) + pairs
    source = dataclasses.replace(CONFIG, cross=True)
    assert cross.cost(source, Step(new=1, remembered=6, source=7)).flops == query_and_output + pairs


def test_a_step_meets_what_a_window_keeps():
    window = declared(
        lambda config: AttentionSpec(heads=config.head_layout, mask=Causal() & Window(left=4)), Capability.INCREMENTAL
    )
    near, far = (window.cost(CONFIG, Step(new=2, remembered=count)).flops for count in (4, 400))
    assert near == far == products((2, 10, 24), (2, 12, 10), *[(2, 3, 6), (2, 6, 3)] * 4)


def test_a_step_without_a_step_of_its_own_costs_the_whole_sequence():
    replayed = declared(lambda config: AttentionSpec(heads=config.head_layout, mask=Causal()))
    step, whole = Step(batch=3, new=1, remembered=6), Shape(batch=3, query=7, key=7)
    assert replayed.cost(CONFIG, step) == replayed.cost(CONFIG, whole)


def test_calls_that_no_layer_can_be_given_have_no_price():
    own = declared(lambda config: AttentionSpec(heads=config.head_layout), Capability.INCREMENTAL)
    with pytest.raises(InvalidValue, match=r"shape\.key: 7 .* as many keys as queries, 1"):
        own.cost(CONFIG, Shape(query=1, key=7))
    with pytest.raises(Incompatible, match="causal=False: it cannot decode step by step"):
        own.cost(dataclasses.replace(CONFIG, causal=False), Step(new=1, remembered=6))


def test_no_price_is_negative():
    with pytest.raises(InvalidValue, match=r"cost\.allowed_flops: -1"):
        Cost(flops=3, allowed_flops=-1, parameters=0)


@pytest.mark.parametrize(
    ("score", "own", "learned"),
    [
        (General(), [(5, 3, 3)] * 4 + [(5, 3, 5)] * 4, 4 * 9),
        (
            Additive(intermediate_size=6),
            [(5, 3, 6)] * 4 + [(5, 3, 6)] * 2 + [(25, 6, 1)] * 4,
            4 * 18 + 2 * 18 + 2 * 4 * 6,
        ),
    ],
)
def test_learned_scores_are_priced(score, own, learned):
    mechanism = declared(lambda config: AttentionSpec(heads=config.head_layout, score=score))
    cost = mechanism.cost(CONFIG, Shape(query=5, key=5))
    projections = [(5, 10, 12), (5, 10, 6), (5, 10, 6), (5, 12, 10)]
    assert cost.flops == products(*projections, *own, *[(5, 5, 3)] * 4)
    assert cost.parameters == 10 * 12 + 10 * 6 * 2 + 12 * 10 + learned


def test_the_equation_of_a_spec_names_its_score_and_distribution():
    heads = Heads(query=1, key_value=1, key_size=2, value_size=2)
    equation = AttentionSpec(heads=heads, score=General()).equation
    assert General.equation in equation
    assert "softmax" in equation
