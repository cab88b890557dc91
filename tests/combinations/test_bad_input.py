"""What every mechanism says to bad input: its name, the argument, what was given and what is allowed; never a guess."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from attn_core import Capability, Rotary, Shape, configure, installed
from attn_core.errors import InvalidValue
from attn_core.options import option_fields
from cases import each
from torch import Tensor

WIDTH = 16
NAMES = installed().mechanisms.names()
OPTIONS: dict[str, dict[str, Any]] = {"linformer": {"length": 16, "rank": 4}}


def can(*capabilities: Capability, but: Capability | None = None) -> list[str]:
    """The mechanisms that have these, and not the other."""
    found = [one for one in installed().mechanisms if one.can(*capabilities)]
    return [one.name for one in found if but is None or not one.can(but)]


def layer(name: str, **said: Any) -> Any:
    mechanism = installed().mechanisms.get(name)
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_heads": 4, "max_seq_len": WIDTH} | said
    return mechanism.build(configure(mechanism, OPTIONS.get(name), **sizes)).eval()


@cache
def usual(name: str) -> Any:
    """The layer of the usual sizes, built once for all laws: in evaluation a call changes nothing in it."""
    return layer(name)


def given(name: str, *shape: int) -> tuple[Tensor, ...]:
    """Rows of a shape, the same each time, and a source where the mechanism wants one."""
    torch.manual_seed(1)
    rows = torch.randn(*shape)
    crossing = installed().mechanisms.get(name).only_cross
    return (rows, torch.randn(rows.shape[0], 5, WIDTH)) if crossing else (rows,)


def refused(name: str, field: str, call: Any) -> str:
    """The message of the `InvalidValue` that a call raises for a field, which names the mechanism."""
    with pytest.raises(InvalidValue) as found:
        call()
    assert found.value.metadata["field"] == field
    assert f"mechanism {name!r}" in str(found.value)
    assert found.value.metadata["allowed"]
    return str(found.value)


@each("name", NAMES)
def test_rows_of_another_rank_or_width_are_refused(name: str) -> None:
    for shape in ((7, WIDTH), (1, 2, 7, WIDTH), (1, 7, WIDTH - 1)):
        assert str(shape) in refused(name, "query", partial(usual(name), *given(name, *shape)))


@each("name", can(Capability.CROSS))
def test_a_source_of_another_rank_width_or_number_is_refused(name: str) -> None:
    built, rows = layer(name, cross=True), torch.randn(2, 7, WIDTH)
    for shape in ((5, WIDTH), (2, 5, WIDTH + 1), (3, 5, WIDTH)):
        assert str(shape) in refused(name, "source", partial(built, rows, torch.randn(*shape)))


@each("name", can(Capability.PADDING))
def test_padding_that_does_not_fit_the_keys_is_refused(name: str) -> None:
    built, rows = usual(name), given(name, 2, 5, WIDTH)
    assert "(2, 4)" in refused(
        name, "key_padding_mask", lambda: built(*rows, key_padding_mask=torch.ones(2, 4, dtype=torch.bool))
    )
    assert "float32" in refused(name, "key_padding_mask", lambda: built(*rows, key_padding_mask=torch.ones(2, 5)))


@each("name", NAMES)
def test_heads_that_do_not_divide_the_width_are_refused(name: str) -> None:
    assert "num_heads: 3 is not allowed" in refused(name, "num_heads", lambda: layer(name, num_heads=3))


@each("name", can(Capability.GROUPED))
def test_key_value_heads_that_do_not_divide_the_heads_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=rf"mechanism '{name}'.*(key_value|num_kv_heads)"):
        layer(name, num_kv_heads=3)


@each("name", sorted(set(can(Capability.ROTARY)) - {"mla", "sparse_mla"}))
def test_rotary_positions_of_an_odd_head_are_refused(name: str) -> None:
    """Latent attention turns a part of its own, whose size is an option."""
    with pytest.raises(InvalidValue, match=rf"mechanism '{name}'.*rotary.*head_size 3"):
        layer(name, head_dim=3, rotary=Rotary())


@each("name", can(Capability.BIDIRECTIONAL, but=Capability.CAUSAL))
def test_a_mechanism_without_a_causal_form_refuses_the_request(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    said = refused(name, "causal", lambda: configure(mechanism, hidden_size=WIDTH, causal=True))
    assert said.startswith("causal: True is not allowed; allowed: False")
    assert configure(mechanism, hidden_size=WIDTH).causal is False


@each("name", can(Capability.CAUSAL, but=Capability.BIDIRECTIONAL))
def test_a_mechanism_that_only_looks_back_refuses_to_look_ahead(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    said = refused(name, "causal", lambda: configure(mechanism, hidden_size=WIDTH, causal=False))
    assert said.startswith("causal: False is not allowed; allowed: True")


@each("name", NAMES)
def test_few_rows_or_none_give_as_many(name: str) -> None:
    """So is every sequence that is shorter than a block."""
    for shape in ((2, 0, WIDTH), (0, 4, WIDTH), (2, 1, WIDTH)):
        out = usual(name)(*given(name, *shape))
        assert out.shape == shape
        assert out.isfinite().all()


@each("name", can(Capability.CROSS))
def test_an_empty_source_gives_no_nan(name: str) -> None:
    out = layer(name, cross=True)(torch.randn(2, 3, WIDTH), torch.randn(2, 0, WIDTH))
    assert out.shape == (2, 3, WIDTH)
    assert out.isfinite().all()


@each("name", can(Capability.PADDING))
def test_keys_that_are_all_masked_give_no_nan_and_no_gradient_of_one(name: str) -> None:
    rows = given(name, 2, 5, WIDTH)
    for one in rows:
        one.requires_grad_()
    out = usual(name)(*rows, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool))
    assert out.isfinite().all()
    found = torch.autograd.grad(out.sum(), rows, allow_unused=True) if out.requires_grad else ()
    assert all(one is None or bool(one.isfinite().all()) for one in found)


@each("name", NAMES)
def test_a_number_that_is_none_stays_in_its_sequence_and_large_ones_make_none(name: str) -> None:
    built = usual(name)
    rows = given(name, 2, 5, WIDTH)
    clean = built(*rows)[1]
    for bad in (float("nan"), float("inf"), float("-inf")):
        rows[0][0, 2] = bad
        assert torch.allclose(built(*rows)[1], clean, atol=1e-5)
    assert built(*(1e4 * one for one in given(name, 1, 5, WIDTH))).isfinite().all()


BAD_OPTIONS = [
    ("sliding_window", "window", 0),
    ("dilated_window", "window", 0),
    ("dilated_window", "dilations", (1, 0)),
    ("dilated_window", "dilations", ()),
    ("longformer", "window", -1),
    ("longformer", "global_positions", (-1,)),
    ("attention_sinks", "sinks", -1),
    ("neighborhood", "size", 0),
    ("neighborhood", "dilation", 0),
    ("bigbird", "block", 0),
    ("bigbird", "random", -1),
    ("strided", "stride", 0),
    ("fixed", "summaries", 129),
    ("chunk_ring", "chunk", 0),
    ("chunked", "chunk", 0),
    ("block_local", "block", 0),
    ("entmax", "alpha", 1.0),
    ("entmax", "alpha", 0.5),
    ("entmax", "alpha", float("nan")),
    ("local_m", "radius", 0),
    ("linformer", "rank", 0),
    ("linformer", "length", 0),
    ("lsh", "chunk", 0),
    ("performer", "features", 0),
    ("location", "longest", 0),
    ("moba", "top", 0),
    ("nsa", "stride", 0),
    ("dsa", "top", 0),
    ("block_local", "reach", -1),
    ("chunk_ring", "chunk", 0),
    ("clustered", "clusters", 0),
    ("compressive", "segment", 0),
    ("dependency", "clip", -1),
    ("gemma", "window", 0),
    ("h2o", "heavy", -1),
    ("h2o", "recent", 0),
    ("key_value", "window", 0),
    ("local_p", "radius", 0),
    ("mla", "rotary_size", 3),
    ("compressed", "every", 1),
    ("compressed", "output_groups", 3),
    ("moba", "block", 0),
    ("nsa", "window", 0),
    ("ntm", "shift", -1),
    ("nystrom", "landmarks", 0),
    ("path", "block", 0),
    ("qk_l2_norm", "length", 1),
    ("routing", "decay", 1.5),
    ("routing", "decay", -0.1),
    ("routing", "window", 0),
    ("sampled", "expected", 1.1),
    ("sampled", "expected", -0.1),
    ("sinkhorn", "block", 0),
    ("sparse_mla", "rotary_size", 3),
    ("visual_hard", "mean_rate", 1.5),
    ("visual_hard", "mean_rate", -0.5),
]


NO_VALUES: tuple[Any, ...] = (None, "much", [], {}, True, 0.5, -1, float("nan"), float("inf"), 10**30)
"""None of them is of every type; the last is of none."""


def taken(name: str, option: str) -> list[Any]:
    """Those of `NO_VALUES` that an option takes; the others are refused by its name, and nothing else is raised."""
    mechanism, found = installed().mechanisms.get(name), []
    for value in NO_VALUES:
        try:
            mechanism.build(configure(mechanism, {option: value}, hidden_size=WIDTH, num_heads=4))
        except InvalidValue as error:
            known = f"mechanism {name!r}" in str(error) and option in error.metadata.get("field", "")
            found += [] if known else [error]
        else:
            found.append(value)
    return found


@each("name", NAMES)
def test_an_option_of_another_type_is_refused_by_its_name_and_nothing_else_is_raised(name: str) -> None:
    config = installed().mechanisms.get(name).Config
    for option in option_fields(installed().mechanisms.get(name)):
        found = taken(name, option)
        assert not any(isinstance(value, InvalidValue) for value in found), found
        assert len(found) < 4, f"{option} takes {found}"
        if str(config.__dataclass_fields__[option].type).startswith("int"):
            assert set(map(str, found)) <= {"None", "-1"}, f"{option} takes {found}"


@each("name,option,value", BAD_OPTIONS)
def test_an_option_out_of_its_range_is_refused(name: str, option: str, value: Any) -> None:
    """Sizes and shares outside their range, alpha of one and below, and the like."""
    mechanism = installed().mechanisms.get(name)
    with pytest.raises(InvalidValue, match=rf"mechanism '{name}'.*{option}"):
        mechanism.build(configure(mechanism, {option: value}, hidden_size=WIDTH))


@each("name", ["dependency", "dependency_depth"])
def test_a_cycle_in_a_tree_of_words_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=rf"mechanism '{name}'.*the cycle 0 -> 1 -> 0.*a tree"):
        configure(installed().mechanisms.get(name), {"parse": (1, 0)}, hidden_size=WIDTH)


@each("name,length", [("linformer", 17), ("location", 17)])
def test_positions_beyond_a_learned_table_are_refused(name: str, length: int) -> None:
    with pytest.raises(InvalidValue, match="at most 16"):
        usual(name)(torch.randn(1, length, WIDTH))


def test_a_price_cannot_be_asked_for_a_form_that_is_not() -> None:
    mechanism = installed().mechanisms.get("linformer")
    assert mechanism.cost(configure(mechanism, hidden_size=WIDTH), Shape(query=9, key=9)).flops > 0
    with pytest.raises(InvalidValue, match="no causal form"):
        mechanism.cost(configure(mechanism, hidden_size=WIDTH, causal=True), Shape(query=9, key=9))
