"""Choosing kernels: what is accepted, refused, preferred and said."""

import dataclasses

import pytest

from attn_core import AttentionSpec, Causal, Heads
from attn_core.errors import InvalidValue, KernelRefused, UnknownName
from attn_core.kernels.attend import AttendKernel, AttendProblem, attend_problem
from attn_core.kernels.base import Anything, AtMost, Kernel, MultipleOf, OneOf, Problem
from attn_core.kernels.dispatch import choose, explain
from attn_core.modifiers import Alibi
from attn_core.plugins.registry import Registry
from attn_core.scores import General


def kernel(kernel_name, price, absent=None, **conditions):
    class Made(AttendKernel):
        name = kernel_name
        summary = "for these tests"
        accepts = conditions

        def available(self):
            return absent

        def cost(self, problem):
            return price

        def run(self, spec, operands):
            raise NotImplementedError

    return Made()


class ScanProblem(Problem):
    operation = "scan"


class ScanKernel(Kernel):
    name = "scan"
    summary = "another operation"
    problem = ScanProblem
    accepts = {}

    def cost(self, problem):
        return 0.1


EVERY_FIELD = {field: Anything() for field in AttendProblem.defaults()}
PLAIN = kernel("plain", 1.0, **EVERY_FIELD)
FAST = kernel(
    "fast",
    0.2,
    mask=OneOf("full", "causal"),
    key_size=AtMost(128),
    value_size=MultipleOf(8),
    query_heads=Anything(),
    key_value_heads=Anything(),
    modifiers=OneOf("alibi", "soft_cap"),
)
EASY = AttendProblem(key_size=64, value_size=64, query_heads=4, key_value_heads=4)


@pytest.fixture
def kernels():
    registry = Registry("kernel")
    for one in (PLAIN, FAST):
        registry.register(one, "tests")
    return registry


def test_the_cheapest_that_accepts_is_chosen(kernels):
    assert choose(kernels, EASY) is FAST
    assert choose(kernels, dataclasses.replace(EASY, mask="window")) is PLAIN


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": "window"}, "mask: 'window' is not one of 'full', 'causal'"),
        ({"key_size": 256}, "key_size: 256 is more than 128"),
        ({"value_size": 12}, "value_size: 12 is not a multiple of 8"),
        ({"modifiers": ("alibi", "function")}, "modifiers: ('alibi', 'function') is not one of 'alibi', 'soft_cap'"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_takes(change, reason):
    assert FAST.refusals(dataclasses.replace(EASY, **change)) == [reason]


def test_a_problem_of_another_operation_is_refused_even_if_it_has_the_same_fields():
    class Scan(AttendProblem):
        operation = "scan"

    assert FAST.refusals(Scan(key_size=64, value_size=64)) == ["operation: computes attend, not scan"]


@pytest.mark.parametrize(
    "change",
    [
        {"score": "general"},
        {"distribution": "sparsemax"},
        {"irregular_groups": True},
        {"padded": True},
        {"weights": True},
        {"gradients": True},
        {"dtype": "bfloat16"},
        {"device": "cuda"},
    ],
)
def test_a_field_that_a_kernel_does_not_mention_must_hold_its_default(change):
    (field,) = change
    refusals = FAST.refusals(dataclasses.replace(EASY, **change))
    assert [refusal.partition(":")[0] for refusal in refusals] == [field]
    assert PLAIN.refusals(dataclasses.replace(EASY, **change)) == []


def test_a_kernel_without_conditions_refuses_even_modifiers():
    assert kernel("bare", 1.0).refusals(AttendProblem(modifiers=("alibi",))) == [
        "modifiers: ('alibi',) is not supported"
    ]


def test_every_reason_of_a_refusal_is_given():
    assert len(FAST.refusals(dataclasses.replace(EASY, mask="window", key_size=256, padded=True))) == 3


def test_a_kernel_asked_for_by_name_that_refuses_raises_and_nothing_replaces_it(kernels):
    with pytest.raises(KernelRefused, match=r"kernel 'fast' refuses attend: fast \(mask: 'window'"):
        choose(kernels, dataclasses.replace(EASY, mask="window"), "fast")
    assert choose(kernels, EASY, "plain") is PLAIN


def test_an_unknown_kernel_is_answered_with_near_names(kernels):
    with pytest.raises(UnknownName, match="did you mean 'fast'"):
        choose(kernels, EASY, "fsat")


def test_a_kernel_that_cannot_run_here_is_not_chosen_and_says_why(kernels):
    absent = kernel("gpu", 0.01, absent="there is no GPU", **EVERY_FIELD)
    kernels.register(absent, "tests")
    assert choose(kernels, EASY) is FAST
    verdict = next(verdict for verdict in explain(kernels, EASY) if verdict.kernel is absent)
    assert verdict.reasons == ("there is no GPU",)
    assert not verdict.accepted


def test_a_kernel_that_alters_what_is_computed_runs_only_where_it_is_named(kernels):
    rounding = kernel("rounding", 0.01, **EVERY_FIELD)
    type(rounding).alters = "rounds to 8 bits"
    kernels.register(rounding, "tests")
    assert choose(kernels, EASY) is FAST
    assert choose(kernels, EASY, "rounding") is rounding
    verdict = next(verdict for verdict in explain(kernels, EASY) if verdict.kernel is rounding)
    assert verdict.reasons == ("only used if selected by name: rounds to 8 bits",)


def test_explain_puts_the_chosen_first_and_those_who_refuse_last(kernels):
    kernels.register(ScanKernel(), "tests")
    assert [verdict.kernel.name for verdict in explain(kernels, EASY)] == ["fast", "plain", "scan"]
    assert [verdict.cost for verdict in explain(kernels, EASY)] == [0.2, 1.0, None]


def test_where_all_refuse_everyone_is_named(kernels):
    with pytest.raises(KernelRefused, match=r"no installed kernel accepts scan: .*fast.*plain"):
        choose(kernels, ScanProblem())
    with pytest.raises(KernelRefused, match="none is installed"):
        choose(Registry("kernel"), EASY)


def test_a_kernel_cannot_accept_a_field_that_problems_do_not_have():
    with pytest.raises(InvalidValue, match="flavour"):
        kernel("odd", 1.0, flavour=OneOf("sweet"))


def test_the_problem_of_a_spec_says_all_that_kernels_are_asked():
    heads = Heads(query=3, key_value=2, key_size=4, value_size=6, groups=(0, 1, 1))
    spec = AttentionSpec(heads=heads, score=General(), modifiers=(Alibi(),), mask=Causal())
    problem = attend_problem(spec, dtype="float32", device="cpu", gradients=True, padded=True)
    assert problem == AttendProblem(
        score="general",
        modifiers=("alibi",),
        mask="causal",
        key_size=4,
        value_size=6,
        query_heads=3,
        key_value_heads=2,
        irregular_groups=True,
        padded=True,
        gradients=True,
    )
