"""Decode steps of recurrences as data, and which kernel computes a layer's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from attn_core import Computation
from attn_core.batch import SlotsInPlace
from attn_core.computation import WholeCall
from attn_core.errors import InvalidValue
from attn_core.kernels.base import Anything
from attn_core.kernels.recurrent_step import (
    RecurrentStepDispatcher,
    RecurrentStepInputs,
    RecurrentStepKernel,
    RecurrentStepProblem,
    RecurrentStepSpec,
    recurrent_step_problem,
)

SPEC = RecurrentStepSpec(num_heads=4, num_key_heads=2, key_size=8, value_size=16, decay="head", norm_heads=2)
ROWS = SimpleNamespace(dtype="torch.float32", device=SimpleNamespace(type="cpu"))
KEPT = SlotsInPlace({}, None)


class Everything(RecurrentStepKernel):
    """Accepts every problem; gives what it was given."""

    name = "everything"
    summary = "accepts everything"
    accepts = {field: Anything() for field in RecurrentStepProblem.defaults()}
    price = 0.5
    absent = None

    def available(self):
        return self.absent

    def cost(self, problem):
        return self.price

    def run(self, inputs):
        return inputs


class Plainest(Everything):
    name = "plainest"
    accepts = {"num_heads": Anything(), "num_key_heads": Anything(), "key_size": Anything(), "value_size": Anything()}
    price = 0.1


class Absent(Everything):
    name = "absent"
    absent = "no such chip"


class Dear(Everything):
    name = "dear"
    price = 1.0


class Broken(Everything):
    name = "broken"
    price = 0.2

    def run(self, inputs):
        raise RuntimeError("cannot be compiled")

    def unsupported(self, error):
        return str(error)


def run(*kernels, spec=SPEC, view=None, gradients=False):
    """What comes of a step of a layer, and how often its inputs were made."""
    made = []
    view = SimpleNamespace(in_place=lambda: KEPT) if view is None else view

    def inputs(kept):
        made.append(kept)
        return kept

    return RecurrentStepDispatcher(kernels).run(spec, ROWS, view, inputs, gradients=gradients), made


def test_a_problem_says_all_that_the_spec_says():
    problem = recurrent_step_problem(SPEC, dtype="bfloat16", device="cuda", gradients=True)
    for field in dataclasses.fields(SPEC):
        assert getattr(problem, field.name) == getattr(SPEC, field.name)
    assert (problem.operation, problem.dtype, problem.device) == ("recurrent_step", "bfloat16", "cuda")
    assert problem.gradients
    from_computation = Computation(asked=SPEC).problem(WholeCall(dtype="bfloat16", device="cuda", gradients=True))
    assert from_computation == problem


def test_sizes_follow_from_the_spec():
    assert SPEC.channels == 2 * 2 * 8 + 4 * 16
    assert (SPEC.columns, dataclasses.replace(SPEC, normalizer=True).columns) == (16, 17)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_heads", 0),
        ("key_size", -1),
        ("num_key_heads", 3),
        ("norm_heads", 3),
        ("norm_heads", -1),
        ("decay_form", "log"),
    ],
)
def test_specs_that_mean_nothing_are_refused_by_name(field, value):
    with pytest.raises(InvalidValue) as refused:
        dataclasses.replace(SPEC, **{field: value}, step_size=field == "decay_form")
    assert refused.value.metadata["field"] == field


def test_a_kernel_that_does_not_mention_a_stage_refuses_it():
    problem = recurrent_step_problem(SPEC, dtype="float32", device="cpu")
    fields = [reason.split(":")[0] for reason in Plainest().refusals(problem)]
    assert fields == ["decay", "norm_heads"]
    assert Plainest().refusals(dataclasses.replace(problem, decay="none", norm_heads=0)) == []


def test_the_cheapest_kernel_that_accepts_gets_the_inputs_over_the_states_in_place():
    assert run(Everything(), Dear()) == (KEPT, [KEPT])
    assert run(Plainest(), Everything(), Absent()) == (KEPT, [KEPT])


@pytest.mark.parametrize(
    "kernels", [(), (Absent(),), (Dear(),), (Plainest(),)], ids=["none", "absent", "dear", "refuses"]
)
def test_where_no_kernel_costs_less_the_layer_computes_and_no_inputs_are_made(kernels):
    assert run(*kernels) == (None, [])


def test_with_gradients_only_a_kernel_that_has_them_is_taken():
    class WithoutGradients(Everything):
        accepts = {field: Anything() for field in RecurrentStepProblem.defaults() if field != "gradients"}

    assert run(WithoutGradients(), gradients=True) == (None, [])
    assert run(WithoutGradients())[0] is KEPT


@pytest.mark.parametrize("view", [SimpleNamespace(), SimpleNamespace(in_place=lambda: None)], ids=["hidden", "none"])
def test_where_a_store_shows_no_states_the_layer_computes(view):
    assert run(Everything(), view=view) == (None, [])


def test_where_a_chip_cannot_run_a_kernel_the_next_one_computes_or_the_layer():
    assert run(Broken(), Everything())[0] is KEPT
    assert run(Broken())[0] is None


def test_inputs_name_what_is_there():
    inputs = RecurrentStepInputs(spec=SPEC, query=1, key=2, value=3, state=KEPT)
    assert (inputs.scales, inputs.convolution, inputs.decay, inputs.output.gate) == ((1.0, 1.0), None, None, None)


def test_a_request_that_computes_one_token_beside_others_is_given_its_slot_alone():
    kept = SlotsInPlace({"S": 1}, [7, 8, 9])
    view = SimpleNamespace(in_place=lambda: kept)
    plan = RecurrentStepDispatcher((Everything(),))
    found = plan.run(SPEC, ROWS, view, lambda given: given, gradients=False, request=1)
    assert (found.fields, found.slots) == (kept.fields, [8])
