"""Compares a mechanism with an independent result in a test, and records the error for reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from attn_core.errors import InvalidValue
from torch import Tensor

from attn_testing.law import require_same

Record = Callable[[str, object], None]
"""pytest's fixture `record_property`, or any other function that takes a name and a value."""

Function = Callable[..., Tensor]


class Agreement:
    """A comparison of one mechanism with one oracle.

    The oracle is named in exactly one of four ways: `package`, a distribution and the class or function called from it
    ("torch-geometric GATConv"); `paper`, an implementation of the paper ("equations 3 and 4 in loops") that takes only
    the weights from the mechanism; `parts`, the definitions of the parts that the mechanism's own spec names, which
    tests how the spec is computed and not the spec; `identity`, a special case in which it must equal another
    mechanism ("one group is mqa").

    Every comparison raises `LawBroken` where an element differs by more than `tolerance` (1 + |expected|), and records
    the largest error, in those units, under the name "agrees".
    """

    def __init__(
        self,
        record: Record,
        mechanism: str,
        *,
        package: str = "",
        paper: str = "",
        parts: str = "",
        identity: str = "",
    ) -> None:
        given = {"package": package, "paper": paper, "parts": parts, "identity": identity}
        named = [(kind, words) for kind, words in given.items() if words]
        if len(named) != 1:
            raise InvalidValue.of(f"oracle of {mechanism}", named, "exactly one of package, paper, parts and identity")
        self._record, self._mechanism = record, mechanism
        self._kind, self._oracle = named[0]
        if self._kind == "package":
            distribution, _, called = package.partition(" ")
            self._oracle = f"{distribution} {version(distribution).split('+')[0]} {called}".strip()

    def outputs(self, found: Tensor, expected: Tensor, tolerance: float) -> None:
        """Compare two tensors of the same shape: outputs, weights, or intermediate results."""
        self._compare("outputs", [found], [expected], tolerance)

    def gradients(self, found: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float) -> None:
        """Compare the gradients with respect to several tensors, in pairs."""
        self._compare("gradients", list(found), list(expected), tolerance)

    def functions(
        self,
        ours: Function,
        theirs: Function,
        *inputs: Tensor,
        tolerance: float,
        weights: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Compare the results of two functions of `inputs`, and the gradients to `inputs` and to pairs of `weights`."""
        mine = results(ours, inputs, [own for own, _ in weights])
        other = results(theirs, inputs, [their for _, their in weights])
        self.outputs(mine[0], other[0], tolerance)
        self.gradients(mine[1:], other[1:], tolerance)

    def _compare(self, part: str, found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
        if len(found) != len(expected) or not found:
            raise InvalidValue.of(
                f"{part} of {self._mechanism}",
                (len(found), len(expected)),
                "as many found as expected tensors, and at least one",
            )
        for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            what = f"{part} {place} of {self._mechanism} and those of {self._oracle}"
            require_same(ours, theirs, what, tolerance)
        error = max(map(error_of, found, expected))
        entry = {"mechanism": self._mechanism, "kind": self._kind, "oracle": self._oracle, "part": part, "error": error}
        self._record("agrees", json.dumps(entry | {"dtype": str(found[0].dtype).removeprefix("torch.")}))


def results(function: Function, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a fixed weighted sum of it with respect to the inputs and the weights."""
    given = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = function(*given)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    found = torch.autograd.grad((out * probe).sum(), [*given, *weights], materialize_grads=True)
    return [out.detach(), *found]


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest |found - expected| / (1 + |expected|); 0 for empty tensors."""
    ours, theirs = found.detach().to(torch.float64), expected.detach().to(torch.float64)
    errors: Any = (ours - theirs).abs() / (1 + theirs.abs())
    return float(errors.max()) if errors.numel() else 0.0
