from __future__ import annotations

from types import SimpleNamespace

import pytest

from attn_core import Heads
from attn_core.errors import KernelRefused
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.base import Anything, OneOf
from attn_core.kernels.recurrence import (
    RecurrenceDispatcher,
    RecurrenceKernel,
    RecurrenceProblem,
    RecurrenceSpec,
    Steps,
    recurrence_problem,
)
from attn_core.plugins.registry import Registry

torch = pytest.importorskip("torch")


class Everything(RecurrenceKernel):
    name = "everything"
    summary = "accepts everything"
    accepts = {field: Anything() for field in RecurrenceProblem.defaults()}

    def cost(self, problem):
        return 1.0

    def run(self, steps, before, chunk):
        return (self.name, chunk), before


class Plainest(Everything):
    name = "plainest"
    accepts = {"key_size": Anything(), "value_size": Anything(), "decay": OneOf("none", "head")}

    def cost(self, problem):
        return 0.1 if problem.tokens == 1 else 0.5


class Unrunnable(Everything):
    name = "unrunnable"

    def cost(self, problem):
        return 0.01

    def unsupported(self, error):
        return str(error) if isinstance(error, ArithmeticError) else None

    def run(self, steps, before, chunk):
        raise (ArithmeticError if chunk < 9 else TypeError)("too few registers")


def rows(*shape, requires_grad=False):
    device = SimpleNamespace(type="cpu")
    return SimpleNamespace(shape=shape, dtype="torch.float32", device=device, requires_grad=requires_grad)


def steps(channels=None, strength=False, **more):
    fades = None if channels is None else rows(1, 5, 1, channels)
    return Steps(
        rows(1, 5, 1, 4, **more), rows(1, 5, 1, 4), rows(1, 5, 1, 3), fades, rows(1, 5, 1) if strength else None
    )


def chosen(plan, given):
    return plan.run(given, None, 16)[0][0]


@pytest.fixture
def plan():
    def of(*kernels, name=None):
        registry = Registry("kernel")
        for kernel in kernels:
            registry.register(kernel, "tests")
        return RecurrenceDispatcher(registry, name)

    return of


def test_the_cheapest_kernel_that_accepts_computes(plan):
    both = plan(Everything(), Plainest())
    assert chosen(both, steps()) == "plainest"
    assert chosen(both, steps(1)) == "plainest"
    assert chosen(both, steps(4)) == "everything"
    assert chosen(both, steps(strength=True)) == "everything"
    assert chosen(both, steps(requires_grad=True)) == "everything"
    assert both.run(steps(4), None, 16) == (("everything", 16), None)


def test_a_layer_with_a_computation_of_its_own_is_told_of_cheaper_kernels_only(plan):
    both = plan(Everything(), Plainest())
    assert both.run_below(steps(4), None, 16, below=1.0) is None
    assert both.run_below(steps(), None, 16, below=0.3) is None
    assert both.run_below(steps(), None, 16, single=True, below=0.3)[0][0] == "plainest"


def test_a_kernel_asked_for_by_name_is_not_replaced(plan):
    named = plan(Everything(), Plainest(), name="plainest")
    assert named.decode(steps(), rows(1, 1, 4, 3))[0] == ("plainest", 1)
    with pytest.raises(KernelRefused, match="plainest"):
        named.run(steps(4), None, 16)


class Keeping(Everything):
    def run(self, steps, before, chunk):
        self.received = steps
        return steps.value, before


class Mixing(Keeping):
    name = "mixing"
    mixes = True

    def cost(self, problem):
        return 0.1

    def refusals(self, problem):
        return [] if problem.dtype == "bfloat16" else ["dtype: bfloat16 only"]


@pytest.mark.parametrize("offered", [(Keeping(),), (Keeping(), Mixing())])
@pytest.mark.parametrize("computed", ["bfloat16", "float16", "float32", None])
def test_steps_are_rounded_to_what_the_model_computes_in_only_for_a_kernel_that_mixes(plan, offered, computed):
    given = tuple(torch.ones(1, 5, 1, 4) for _ in range(3))
    unrounded = Steps(*given, decay=-torch.ones(1, 5, 1, 1))
    out, _ = plan(*offered).run(unrounded, None, 16, computed and getattr(torch, computed))
    mixing = len(offered) == 2 and computed == "bfloat16"
    received = offered[mixing].received
    assert out.dtype == torch.float32
    kinds = (torch.bfloat16 if mixing else torch.float32,) * 3
    assert (*(part.dtype for part in received[:3]), received.decay.dtype) == (*kinds, torch.float32)


def test_where_no_kernel_is_installed_the_error_says_what_brings_one(plan):
    with pytest.raises(KernelRefused, match="attn-variants"):
        plan().run(steps(), None, 16)


def test_kernels_of_recurrences_refuse_attention():
    assert Everything().refusals(AttendProblem()) == ["operation: computes recurrence, not attend"]


def test_the_problem_says_what_fades_and_whether_keys_correct():
    heads = Heads(query=2, key_value=2, key_size=4, value_size=3)
    spec = RecurrenceSpec(heads=heads, decay="channel", delta_rule=True)
    problem = recurrence_problem(spec, dtype="bfloat16", device="cuda", gradients=True, tokens=1)
    assert (problem.operation, problem.decay, problem.delta_rule, problem.tokens) == ("recurrence", "channel", True, 1)
    assert (problem.key_size, problem.value_size, problem.query_heads) == (4, 3, 2)
    assert [reason.partition(":")[0] for reason in Plainest().refusals(problem)] == [
        "dtype",
        "device",
        "decay",
        "delta_rule",
        "query_heads",
        "key_value_heads",
        "gradients",
    ]


def test_a_kernel_that_a_chip_cannot_run_gives_way_to_the_next(plan, monkeypatch, caplog):
    monkeypatch.setattr("attn_core.kernels.dispatch._said", set())
    layer = plan(Unrunnable(), Everything())
    for _ in range(2):
        assert layer.run(steps(), None, 8)[0] == ("everything", 8)
        assert layer.decode(steps(), None)[0] == ("everything", 1)
    assert len([record for record in caplog.records if "unrunnable" in record.getMessage()]) == 1
    with pytest.raises(TypeError, match="registers"):
        plan(Unrunnable(), Everything()).run(steps(), None, 9)
    with pytest.raises(ArithmeticError, match="registers"):
        plan(Unrunnable(), Everything(), name="unrunnable").run(steps(), None, 8)
    with pytest.raises(KernelRefused):
        plan(Unrunnable()).run(steps(), None, 8)
