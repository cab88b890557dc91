"""Score functions with learned parameters: a layer creates, trains and saves them, and every kernel is handed them."""

import math

import attn_variants
import pytest
import torch
from attn_core import AttentionSpec, Capability, Causal, DeclaredMechanism, Heads, Paper, Shape, configure
from attn_core.errors import InvalidValue
from attn_core.masks import Predicate
from attn_core.modifiers import ScoreFunction, SoftCap
from attn_core.scores import ScaledDot
from attn_variants.attention.layer import SpecLayer
from torch import nn

WORDS = {"slope": ("heads",), "shared": ("kv_heads", 3), "vector": ("head_dim",)}


def fading(score, head, query, key, slope, shared, vector):
    return score * (1 + vector.sum()) - slope[head] * (query - key) + shared[head // 2, (query - key) % 3]


class Fading(DeclaredMechanism):
    name = "fading"
    summary = "for these tests"
    paper = Paper(title="None", authors="Nobody", year=2000)
    equation = "x"
    capabilities = frozenset(Capability) - {Capability.CROSS, Capability.CHOOSES}

    def spec(self, config):
        function = ScoreFunction(fading, parameters=WORDS, initial={"slope": 0.5, "shared": (1.0, 2.0)})
        return AttentionSpec(heads=config.head_layout, modifiers=(function,), mask=Causal(), rotary=config.rotary)


def layer_of(**changes):
    torch.manual_seed(0)
    return Fading().build(configure(Fading(), hidden_size=12, num_heads=4, num_kv_heads=2, **changes))


def test_parameters_have_the_shapes_and_the_values_that_are_declared():
    learned = dict(layer_of().modifiers["function"].named_parameters())
    assert {name: tuple(weight.shape) for name, weight in learned.items()} == {
        "slope": (4,),
        "shared": (2, 3),
        "vector": (3,),
    }
    assert torch.equal(learned["slope"], torch.full((4,), 0.5))
    assert 1 <= learned["shared"].min() < learned["shared"].max() <= 2
    assert 0 < learned["vector"].abs().max() < 0.1


def by_loops(layer, rows):
    """Attention of each head and query by itself, from the weights of the layer."""
    query, key, value = (
        (rows @ part.weight.T).unflatten(-1, (-1, 3)) for part in (layer.query, layer.key, layer.value)
    )
    learned = dict(layer.modifiers["function"].named_parameters())
    out = []
    for i in range(len(rows)):
        for head in range(4):
            group = head // 2
            energies = [
                (query[i, head] @ key[j, group]) / math.sqrt(3) * (1 + learned["vector"].sum())
                - learned["slope"][head] * (i - j)
                + learned["shared"][group, (i - j) % 3]
                for j in range(i + 1)
            ]
            out.append(torch.stack(energies).softmax(0) @ value[: i + 1, group])
    return torch.stack(out).view(len(rows), 12) @ layer.output.weight.T


@pytest.mark.parametrize("kernel", [None, "plain"])
def test_outputs_and_gradients_are_those_of_loops_under_every_kernel_that_takes_functions(kernel):
    layer = layer_of().double()
    layer.use_kernel(kernel)
    rows = torch.randn(9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = layer(rows[None])[0], by_loops(layer, rows)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = list(layer.parameters())
    for (name, _), own, plain in zip(
        layer.named_parameters(),
        torch.autograd.grad(ours.square().sum(), weights),
        torch.autograd.grad(theirs.square().sum(), weights),
        strict=True,
    ):
        assert own.abs().max() > 1e-6
        assert torch.allclose(own, plain, rtol=1e-11, atol=1e-11), name


def test_a_trained_layer_comes_back_from_its_state_dict_and_other_weights_answer_otherwise():
    layer, other = layer_of(), layer_of()
    rows = torch.randn(1, 6, 12, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        layer.modifiers["function"].slope += torch.arange(4.0)
    assert not torch.allclose(layer(rows), other(rows))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(rows), other(rows))


def test_learned_parameters_are_counted_in_the_price():
    config = configure(Fading(), hidden_size=12, num_heads=4, num_kv_heads=2)
    assert Fading().cost(config, Shape()).parameters == sum(weight.numel() for weight in layer_of().parameters())


def test_a_compiled_layer_computes_the_same():
    layer = layer_of()
    rows = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(torch.compile(layer, backend="eager")(rows), layer(rows), atol=1e-6)


NET = nn.Linear(1, 1)


class Holder:
    def __init__(self):
        self.table = nn.Parameter(torch.ones(2))

    def __call__(self, score, head, query, key):
        return score + self.table[head]


def closed():
    inner = nn.Linear(1, 1)
    return lambda score, head, query, key: score + inner(score[..., None])[..., 0]


@pytest.mark.parametrize(
    "function",
    [
        nn.Bilinear(1, 1, 1),
        Holder(),
        Holder().__call__,
        closed(),
        lambda score, head, query, key: NET(score[..., None])[..., 0],
        lambda score, head, query, key, net=NET: score,
    ],
    ids=["module", "object", "method", "closure", "global", "default"],
)
def test_a_module_inside_a_score_function_is_refused(function):
    with pytest.raises(InvalidValue, match=r"torch\.nn\.(Module|Parameter) .* no learned tensors inside: declare them"):
        ScoreFunction(function)


def test_a_module_inside_a_mask_or_another_modifier_is_refused():
    with pytest.raises(InvalidValue, match=r"predicate\.function: 'torch.nn.Module Linear'"):
        Predicate(lambda query, key: NET(query) > key)
    capped = SoftCap(cap=2.0)
    object.__setattr__(capped, "net", NET)
    spec = AttentionSpec(heads=Heads(query=1, key_value=1, key_size=4, value_size=4), modifiers=(capped,))
    with pytest.raises(InvalidValue, match=r"modifiers\.soft_cap: 'torch.nn.Module Linear'"):
        SpecLayer(spec, hidden_size=4, bias=False)


def test_a_parameter_with_a_name_of_torchs_is_refused():
    function = ScoreFunction(lambda score, head, query, key, training: score, parameters={"training": (1,)})
    heads = Heads(query=1, key_value=1, key_size=4, value_size=4)
    with pytest.raises(InvalidValue, match="'training' is not allowed; allowed: names that are not attributes"):
        SpecLayer(AttentionSpec(heads=heads, modifiers=(function,)), hidden_size=4, bias=False)


def test_functions_without_parameters_are_as_before():
    plain = ScoreFunction(lambda score, head, query, key: score)
    layer = attn_variants.layer("mha", hidden_size=8, num_heads=2)
    heads = Heads(query=2, key_value=2, key_size=4, value_size=4)
    same = SpecLayer(
        AttentionSpec(heads=heads, score=ScaledDot(), modifiers=(plain,), mask=Causal()), hidden_size=8, bias=False
    )
    same.load_state_dict(layer.state_dict())
    rows = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(4))
    assert torch.allclose(same(rows), layer(rows), atol=1e-6)
