import pytest

from attn_core import AttentionSpec, Causal, Heads
from attn_core.distributions import LocalGaussian, SoftmaxWithSink
from attn_core.errors import InvalidValue, UserError
from attn_core.modifiers import RelativeBias, RelativeKeys, ScoreFunction, SoftCap, T5Bias
from attn_core.norms import QkNorm
from attn_core.scores import General, Location

HEADS = Heads(query=4, key_value=2, key_size=8, value_size=6)


def spec(**parts):
    return AttentionSpec(heads=HEADS, **parts)


def test_weights_are_named_by_the_place_of_their_part():
    found = spec(score=General(), modifiers=(RelativeBias(clip=2), SoftCap(cap=3.0)), distribution=SoftmaxWithSink())
    assert found.weights == {
        "score.weight": (4, 8, 8),
        "modifiers.relative_bias.table": (5, 4),
        "distribution.logit": (4,),
    }
    assert found.parameters() == 4 * 8 * 8 + 5 * 4 + 4


def test_norms_are_counted_and_are_not_a_kernels_business():
    normed = spec(norm=QkNorm())
    assert normed.weights == {}
    assert normed.parameters() == 16


def test_the_price_is_that_of_all_parts():
    found = spec(modifiers=(RelativeKeys(clip=3),), distribution=LocalGaussian(radius=2))
    assert found.query_flops() == 2 * 4 * 7 * 8 + 2 * 4 * 8 * 9
    assert found.key_flops() == 0
    assert found.pair_flops() == 2 * 4 * (8 + 6)


def test_a_kind_of_modifier_that_has_weights_is_given_once():
    with pytest.raises(InvalidValue, match="modifiers"):
        spec(modifiers=(T5Bias(), T5Bias(buckets=8, max_distance=20)))
    assert spec(modifiers=(SoftCap(cap=3.0), SoftCap(cap=2.0))).weights == {}


@pytest.mark.parametrize(
    ("parts", "located"),
    [
        ({}, False),
        ({"modifiers": (SoftCap(cap=3.0),)}, False),
        ({"distribution": SoftmaxWithSink()}, False),
        ({"mask": Causal()}, True),
        ({"score": Location(longest=9)}, True),
        ({"modifiers": (T5Bias(),)}, True),
        ({"distribution": LocalGaussian()}, True),
    ],
    ids=str,
)
def test_a_spec_says_whether_it_matters_where_rows_stand(parts, located):
    assert spec(**parts).located == located


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SoftCap(cap=0), "cap"),
        (lambda: Location(longest=0), "longest"),
        (lambda: LocalGaussian(radius=0), "radius"),
        (lambda: T5Bias(buckets=7, bidirectional=True), "buckets"),
        (lambda: T5Bias(buckets=32, max_distance=16), "max_distance"),
        (lambda: RelativeKeys(clip=-1), "clip"),
    ],
)
def test_parts_refuse_values_out_of_their_range(make, named):
    with pytest.raises(InvalidValue, match=named):
        make()


def takes_a_slope(score, head, query, key, slope):
    return score - slope[head] * (query - key)


def test_shapes_of_learned_parameters_follow_from_the_heads():
    heads = Heads(query=4, key_value=2, key_size=3, value_size=5)
    words = {"slope": ("heads", 2, "kv_heads", "head_dim")}
    spec = AttentionSpec(heads=heads, modifiers=(ScoreFunction(takes_a_slope, parameters=words),))
    assert spec.weights == {"modifiers.function.slope": (4, 2, 2, 3)}
    assert spec.parameters() == 48


def test_functions_with_equal_parameters_are_equal_and_hash_alike():
    one, other = (ScoreFunction(takes_a_slope, parameters={"slope": ("heads",)}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != ScoreFunction(takes_a_slope, parameters={"slope": (4,)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parameters": {}}, r"one that takes \(score, head, query, key\): missing a required argument: 'slope'"),
        ({"parameters": {"slope": (1,), "more": (1,)}}, "unexpected keyword argument 'more'"),
        ({"parameters": {"slope": "heads"}}, r"parameters\['slope'\]: 'heads' is not allowed; allowed: a tuple of"),
        ({"parameters": {"slope": ("head",)}}, r"\('head',\) is not allowed"),
        ({"parameters": {"slope": (0,)}}, r"\(0,\) is not allowed"),
        ({"parameters": {"slope": (1,)}, "initial": {"slop": 1.0}}, "unknown parameter of a ScoreFunction 'slop'"),
        ({"parameters": {"slope": (1,)}, "initial": {"slope": "big"}}, r"initial\['slope'\]: 'big'"),
        ({"parameters": {"slope": (1,)}, "initial": {"slope": (1.0, 2.0, 3.0)}}, "a finite number, or two of them"),
    ],
)
def test_parameters_that_a_function_cannot_have_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        ScoreFunction(takes_a_slope, **given)
