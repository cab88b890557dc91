from __future__ import annotations

from types import SimpleNamespace

import pytest

from attn_core.errors import InvalidValue
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.base import TRAINED_IN, Anything, AtMost, OneOf
from attn_core.kernels.rowwise import GateKernel, NormKernel, Targets, row_problem, row_result
from attn_core.plugins import catalog
from attn_core.plugins.catalog import installed_operation


class Narrow(NormKernel):
    name = "narrow"
    summary = "norms of few elements"
    accepts = {"row_size": AtMost(8), "dtype": OneOf("float32", "bfloat16")}
    price = 0.5

    def cost(self, problem):
        return self.price

    def norm(self, rows, gain, eps):
        return rows

    def norm_sum(self, rows, added, gain, eps):
        return rows, rows


class Both(Narrow):
    name = "both"
    accepts = {**Narrow.accepts, "form": OneOf("plain", "added"), "gradients": Anything()}
    price = 0.7


class Absent(Narrow):
    name = "absent"
    price = 0.1

    def available(self):
        return "not here"


class Learning(Narrow):
    name = "learning"
    accepts = {**Narrow.accepts, "training": OneOf(True)}


class Dear(Narrow):
    name = "dear"
    accepts = {"row_size": Anything()}
    price = 1.0


def rows(width=8, *, dtype="torch.float32", requires_grad=False, stride=1):
    return SimpleNamespace(
        shape=(3, width),
        dtype=dtype,
        device=SimpleNamespace(type="cpu"),
        requires_grad=requires_grad,
        stride=lambda axis: stride,
    )


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    kernels = [Narrow(), Both(), Absent(), Dear()]
    offer(monkeypatch, *kernels)
    yield
    installed_operation.cache_clear()


def name_of(*call):
    return row_result(NormKernel, call[0], lambda kernel: kernel.name, *call[1:])


def test_the_cheapest_that_can_run_here_and_accepts_is_chosen():
    assert name_of("plain", rows()) == "narrow"
    assert name_of("added", rows()) == "both"
    assert name_of("plain", rows(requires_grad=True)) == "both"
    assert name_of("plain", rows(), rows(requires_grad=True)) == "both"
    assert name_of("plain", rows(), None) == "narrow"


def test_a_kernel_for_training_is_chosen_in_training_alone(monkeypatch):
    offer(monkeypatch, Learning(), Narrow())
    assert name_of("plain", rows()) == "narrow"
    before = TRAINED_IN.set("float32")
    assert name_of("plain", rows()) == "learning"
    TRAINED_IN.reset(before)
    assert name_of("plain", rows()) == "narrow"


def test_where_nobody_accepts_or_is_faster_the_caller_computes():
    assert name_of("plain", rows(9)) is None
    assert name_of("plain", rows(dtype="torch.float64")) is None
    assert name_of("plain", rows(stride=2)) is None
    assert row_result(GateKernel, "silu", lambda kernel: kernel, rows()) is None


def test_kernels_of_attention_refuse_problems_of_rows_and_the_other_way_round():
    problem = row_problem("rms_norm", 8, form="plain", dtype="float32", device="cpu")
    assert Narrow().refusals(problem) == []
    assert Narrow().refusals(AttendProblem()) == ["operation: computes rms_norm, not attend"]


@pytest.mark.parametrize(
    ("operation", "form", "field"), [("layer_norm", "plain", "operation"), ("gate", "relu", "form")]
)
def test_operations_and_forms_that_do_not_exist_are_refused_with_those_that_do(operation, form, field):
    with pytest.raises(InvalidValue) as refused:
        row_problem(operation, 8, form=form, dtype="float32", device="cpu")
    assert refused.value.metadata["field"] == field


@pytest.mark.parametrize(("wrong", "field"), [({"smoothing": 1.0}, "smoothing"), ({"cap": 0.0}, "cap")])
def test_targets_that_mean_nothing_are_refused(wrong, field):
    with pytest.raises(InvalidValue) as refused:
        Targets(**wrong)
    assert refused.value.metadata["field"] == field


class Unrunnable(Narrow):
    name = "unrunnable"
    price = 0.2

    def unsupported(self, error):
        return str(error) if isinstance(error, ArithmeticError) else None

    def norm(self, rows, gain, eps):
        raise (ArithmeticError if eps else TypeError)("too few registers")


def offer(monkeypatch, *kernels):
    """Have these kernels alone, of which none has failed."""
    monkeypatch.setattr(catalog, "installed", lambda: SimpleNamespace(kernels=kernels))
    installed_operation.cache_clear()


def normed(kernel):
    """Which kernel norms, if it can."""
    kernel.norm(None, None, 1e-6)
    return kernel.name


def test_a_kernel_that_a_chip_cannot_run_gives_way_to_the_next_and_then_to_the_plain_computation(monkeypatch, caplog):
    monkeypatch.setattr("attn_core.kernels.dispatch._said", set())
    offer(monkeypatch, Unrunnable(), Narrow())
    assert row_result(NormKernel, "plain", normed, rows()) == "narrow"
    assert row_result(NormKernel, "plain", normed, rows()) == "narrow"
    assert len([record for record in caplog.records if "unrunnable" in record.getMessage()]) == 1
    offer(monkeypatch, Unrunnable())
    assert row_result(NormKernel, "plain", normed, rows()) is None
    with pytest.raises(TypeError, match="registers"):
        row_result(NormKernel, "plain", lambda kernel: kernel.norm(None, None, 0), rows(width=4))
