import json

import pytest
import torch
from attn_core.errors import InvalidValue

from attn_testing import Agreement, LawBroken


class Kept:
    """What `record_property` would hold."""

    def __init__(self):
        self.entries = []

    def __call__(self, name, value):
        assert name == "agrees"
        self.entries.append(json.loads(value))


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_what_agrees_is_recorded_with_its_largest_error():
    kept = Kept()
    Agreement(kept, "mha", paper="section 3").outputs(rows(1.0, 3.0 + 4e-9), rows(1.0 + 1e-9, 3.0), 1e-8)
    (entry,) = kept.entries
    assert entry.pop("error") == pytest.approx(1e-9, rel=1e-6)
    assert entry == {
        "mechanism": "mha",
        "kind": "paper",
        "oracle": "section 3",
        "part": "outputs",
        "dtype": "float64",
    }


@pytest.mark.parametrize("found", [rows(1.0, 2.1), rows(1.0), rows(1.0, float("nan"))])
def test_what_differs_is_told_and_not_recorded(found):
    kept = Kept()
    with pytest.raises(LawBroken, match="outputs 0 of mha and those of section 3"):
        Agreement(kept, "mha", paper="section 3").outputs(found, rows(1.0, 2.0), 1e-3)
    assert not kept.entries


def test_a_function_that_is_right_with_wrong_gradients_does_not_agree():
    kept = Kept()
    loops = Agreement(kept, "mha", identity="a parabola")
    loops.functions(torch.square, lambda x: x * x, rows(1.0, 2.0), tolerance=1e-12)
    assert [entry["part"] for entry in kept.entries] == ["outputs", "gradients"]
    with pytest.raises(LawBroken, match="gradients 0"):
        loops.functions(torch.square, lambda x: x.detach() * x, rows(1.0, 2.0), tolerance=1e-12)


def test_gradients_to_weights_are_compared_in_pairs():
    mine, other = rows(3.0).requires_grad_(), rows(3.0).requires_grad_()
    same = Agreement(Kept(), "mha", identity="a product")
    same.functions(lambda x: mine * x, lambda x: x * other, rows(2.0), weights=[(mine, other)], tolerance=0)
    with pytest.raises(LawBroken, match="gradients 1"):
        same.functions(lambda x: mine * x, lambda x: x * 3.0, rows(2.0), weights=[(mine, other)], tolerance=0)


def test_a_package_is_named_with_the_version_that_ran():
    kept = Kept()
    Agreement(kept, "mha", package="torch nn.MultiheadAttention").outputs(rows(1.0), rows(1.0), 0)
    assert kept.entries[0]["oracle"] == f"torch {torch.__version__.split('+')[0]} nn.MultiheadAttention"


@pytest.mark.parametrize("named", [{}, {"package": "torch", "paper": "section 3"}])
def test_an_oracle_is_named_in_exactly_one_way(named):
    with pytest.raises(InvalidValue, match="oracle of mha"):
        Agreement(Kept(), "mha", **named)


def test_nothing_compared_is_no_agreement():
    with pytest.raises(InvalidValue, match="gradients of mha"):
        Agreement(Kept(), "mha", paper="section 3").gradients([], [], 1.0)
