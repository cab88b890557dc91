"""Configs of mechanisms: shared fields, own options, and what is wrong with them."""

from dataclasses import MISSING, dataclass

import pytest

from attn_core import Capability, ComputedMechanism, MechanismConfig, Paper, Rotary, configure
from attn_core.errors import Incompatible, InvalidValue, Undeclared, UnknownName
from attn_core.options import option_fields, parse_options


@dataclass(frozen=True, kw_only=True)
class WindowConfig(MechanismConfig):
    window: int
    dilation: int = 1
    slope: float = 0.5


class Windowed(ComputedMechanism):
    name = "windowed"
    summary = "for these tests"
    paper = Paper(title="None", authors="Nobody", year=2000)
    equation = "x"
    capabilities = frozenset()
    Config = WindowConfig

    def build(self, config):
        raise NotImplementedError

    def cost(self, config, shape):
        raise NotImplementedError


def test_a_config_holds_what_the_model_and_the_user_say():
    config = configure(Windowed(), {"window": 4}, hidden_size=16, num_heads=2, causal=False)
    assert config == WindowConfig(hidden_size=16, num_heads=2, causal=False, window=4)


def test_options_that_were_not_said_are_their_defaults_and_the_model_stays():
    config = WindowConfig(hidden_size=8, num_heads=2, window=4, slope=2.0)
    assert WindowConfig.of(config) is config

    @dataclass(frozen=True, kw_only=True)
    class Ranked(MechanismConfig):
        rank: int = 3

    assert Ranked.of(MechanismConfig(hidden_size=8, num_heads=2, causal=False)) == Ranked(
        hidden_size=8, num_heads=2, causal=False
    )
    assert Ranked.of(config) == Ranked(hidden_size=8, num_heads=2), "options of another mechanism are left out"


def test_own_options_are_told_from_shared_fields():
    assert option_fields(Windowed()) == {"window": MISSING, "dilation": 1, "slope": 0.5}


@pytest.mark.parametrize("given", [-0.1, 1.5, float("nan"), float("inf"), "0.1", True, None])
def test_a_dropout_that_is_no_probability_is_refused(given):
    with pytest.raises(InvalidValue, match=r"windowed.*dropout.*from 0 to 1"):
        configure(Windowed(), {"window": 4, "dropout": given}, hidden_size=16)


def test_a_mechanism_that_drops_no_weights_refuses_to():
    with pytest.raises(Incompatible, match=r"dropout: 0.1 .*windowed.*must be 0, not 0.1"):
        configure(Windowed(), {"window": 4}, hidden_size=16, dropout=0.1)


def test_an_unknown_option_is_answered_with_near_ones():
    with pytest.raises(UnknownName, match="option of mechanism 'windowed' 'windw'; did you mean 'window'"):
        configure(Windowed(), {"windw": 4}, hidden_size=16)


def test_a_missing_option_is_named():
    with pytest.raises(InvalidValue, match=r"mechanism 'windowed'.*'window'"):
        configure(Windowed(), {}, hidden_size=16)


def test_whole_floats_become_integers_since_the_wire_has_only_floats():
    config = configure(Windowed(), {"window": 4.0, "slope": 0.25}, hidden_size=16)
    assert (config.window, type(config.window), config.slope) == (4, int, 0.25)


def test_whole_floats_in_lists_become_integers_too():
    @dataclass(frozen=True, kw_only=True)
    class Places(WindowConfig):
        places: tuple[float, ...] = ()

    class Placed(Windowed):
        Config = Places

    config = configure(Placed(), {"window": 4, "places": [0.0, 2.0, 0.5]}, hidden_size=16)
    assert [type(place) for place in config.places] == [int, int, float]


@pytest.mark.parametrize("field", ["hidden_size", "num_heads", "num_kv_heads", "head_dim", "max_seq_len"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4"])
def test_sizes_are_whole_numbers_from_one(field, wrong):
    with pytest.raises(InvalidValue, match=f"{field}: .* is not allowed; allowed: a whole number from 1"):
        MechanismConfig(**{"hidden_size": 16, field: wrong})


def test_heads_divide_the_width_unless_their_size_is_given():
    with pytest.raises(InvalidValue, match="divisor of hidden_size 10"):
        MechanismConfig(hidden_size=10, num_heads=3)
    layout = MechanismConfig(hidden_size=10, num_heads=3, head_dim=4).head_layout
    assert (layout.query, layout.key_value, layout.key_size, layout.value_size) == (3, 3, 4, 4)


def test_key_value_heads_that_do_not_divide_are_refused_when_the_layout_is_asked_for():
    with pytest.raises(InvalidValue, match=r"heads\.key_value: 3"):
        _ = MechanismConfig(hidden_size=16, num_heads=4, num_kv_heads=3).head_layout


class Undecorated(MechanismConfig):
    window: int = 4


@dataclass(frozen=True)
class Positional(MechanismConfig):
    window: int = 4


@dataclass(kw_only=True)
class Thawed:
    width: int


@pytest.mark.parametrize("config", [Undecorated, Positional, Thawed])
def test_a_config_that_is_not_frozen_and_keyword_only_is_refused_when_the_class_is_made(config):
    with pytest.raises(TypeError, match="must be decorated with @dataclass"):
        type("Loose", (Windowed,), {"Config": config})


@dataclass(frozen=True, kw_only=True)
class Taken(MechanismConfig):
    bias: float = 0.5


def test_an_option_with_the_name_of_a_field_of_every_layer_is_refused_when_the_class_is_made():
    with pytest.raises(TypeError, match="bias"):
        type("Own", (Windowed,), {"Config": Taken})


def test_typed_values_are_numbers_where_they_look_like_numbers_and_text_otherwise():
    assert parse_options(["window=64", "slope=0.5", "kind=elu", "flag=true"]) == {
        "window": 64,
        "slope": 0.5,
        "kind": "elu",
        "flag": True,
    }


@pytest.mark.parametrize("pair", ["window", "=64", ""])
def test_a_pair_without_a_name_or_an_equals_sign_is_refused(pair):
    with pytest.raises(InvalidValue, match=r"^--option: .*NAME=VALUE"):
        parse_options([pair])
    with pytest.raises(InvalidValue, match=r"^--model-option: .*NAME=VALUE"):
        parse_options([pair], "--model-option")


@dataclass(frozen=True, kw_only=True)
class TypedConfig(MechanismConfig):
    count: int = 1
    rate: float | None = None
    flag: bool = False
    word: str = "a"
    table: tuple[int, ...] | None = None


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("count", True, "a whole number"),
        ("count", 1.5, "a whole number"),
        ("count", 1 << 63, "64 bits"),
        ("count", None, "a whole number"),
        ("rate", "x", "a finite number or none"),
        ("rate", float("nan"), "a finite number"),
        ("rate", float("inf"), "a finite number"),
        ("rate", False, "a finite number"),
        ("flag", 1, "true or false"),
        ("word", 3, "text"),
    ],
)
def test_an_option_of_another_type_than_it_says_is_refused_with_what_it_may_be(option, value, allowed):
    with pytest.raises(InvalidValue, match=rf"{option}.*{allowed}"):
        TypedConfig(hidden_size=8, **{option: value})


@pytest.mark.parametrize("options", [{"count": -3}, {"rate": 2}, {"rate": None}, {"flag": True}, {"table": "anything"}])
def test_an_option_of_its_type_and_one_that_only_its_owner_can_judge_are_left_to_the_owner(options):
    assert vars(TypedConfig(hidden_size=8, **options)).items() >= options.items()


@pytest.mark.parametrize(
    ("fields", "capability"),
    [
        ({"rotary": Rotary()}, Capability.ROTARY),
        ({"num_heads": 4, "num_kv_heads": 2}, Capability.GROUPED),
        ({"shares_kv": True}, Capability.SHARES_KV),
        ({"bias": True}, Capability.BIAS),
        ({"head_dim": 6}, Capability.HEAD_DIM),
        ({"causal": True}, Capability.CAUSAL),
    ],
)
def test_what_a_mechanism_does_not_declare_is_refused_with_its_name_and_taken_where_it_does(fields, capability):
    field = list(fields)[-1]
    with pytest.raises(Undeclared, match=rf"{field}: .* is not allowed; allowed: .*: mechanism 'windowed' ") as refused:
        configure(Windowed(), {"window": 4}, hidden_size=16, **fields)
    assert refused.value.metadata["field"] == field

    class Able(Windowed):
        capabilities = frozenset({capability})

    config = configure(Able(), {"window": 4}, hidden_size=16, **fields)
    assert getattr(config, field) == fields[field]
    with pytest.raises(Undeclared, match=field):
        Windowed().build(config)


def test_a_mechanism_that_only_looks_back_refuses_to_look_ahead():
    class Past(Windowed):
        capabilities = frozenset({Capability.CAUSAL})

    with pytest.raises(Undeclared, match=r"causal: False is not allowed; allowed: True: .* only looks"):
        configure(Past(), {"window": 4}, hidden_size=16, causal=False)
