"""A field of a problem that a kernel does not mention must hold its default, whatever the operation is."""

import dataclasses

from attn_core import installed
from cases import each

EVERY = {kernel.name: kernel for kernel in (*installed().kernels, *installed().linears, *installed().blocks)}
KERNELS = sorted(EVERY)


def other_than(default):
    """Two values of a field that are not its default."""
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, tuple):
        return [(*default, "unheard_of")]
    if isinstance(default, str):
        return ["unheard_of"]
    return [default + 1, default + 10**9]


@each("name", KERNELS)
def test_fields_that_are_not_mentioned_must_hold_their_defaults(name):
    kernel = EVERY[name]
    plain = kernel.problem()
    silent = set(plain.defaults()) - kernel.accepts.keys() - kernel.problem.priced
    for field in silent:
        for value in other_than(plain.defaults()[field]):
            reasons = kernel.refusals(dataclasses.replace(plain, **{field: value}))
            assert any(reason.startswith(f"{field}:") for reason in reasons), (field, value)


@each("name", KERNELS)
def test_problems_of_other_operations_are_refused(name):
    kernel = EVERY[name]
    others = {other.problem for other in EVERY.values()} - {kernel.problem}
    assert others
    for other in others:
        assert [reason.partition(":")[0] for reason in kernel.refusals(other())] == ["operation"]


@each("name", KERNELS)
def test_prices_alone_refuse_nothing_that_is_not_mentioned(name):
    kernel = EVERY[name]
    plain = kernel.problem()
    for field in kernel.problem.priced - kernel.accepts.keys():
        changed = dataclasses.replace(plain, **{field: plain.defaults()[field] + 1})
        assert kernel.refusals(changed) == kernel.refusals(plain)
