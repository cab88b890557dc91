"""Base classes of laws: test methods that a plugin's test class inherits, the cases they apply to, and assertions."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from attn_core import Capability
from torch import Tensor


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's generator of the CPU, and restore its state at the end.

    `torch.manual_seed` also records a call, with its stack, for the GPUs of a process that has not initialized CUDA.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class LawBroken(AssertionError):
    """A law is broken; the message says where and by how much."""


def require(holds: object, message: str) -> None:
    """Raise `LawBroken` with `message` unless `holds`."""
    if not holds:
        raise LawBroken(message)


def require_same(actual: Tensor, expected: Tensor, what: str, tolerance: float) -> None:
    """Raise `LawBroken` unless the shapes are equal and no element differs by more than `tolerance` (1 + |expected|).

    `what` names the comparison, such as "decoded row 3 and row 3 of the full forward". NaN equals nothing.
    """
    require(actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)} differ")
    if not actual.numel():
        return
    wide = torch.float64 if not expected.is_complex() else torch.complex128
    error = (actual.detach().to(wide) - expected.detach().to(wide)).abs()
    allowed = tolerance * (1 + expected.detach().to(wide).abs())
    if bool((error <= allowed).all()):
        return
    worst = int(torch.where(error <= allowed, 0, error.nan_to_num(float("inf"))).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), error.shape))
    raise LawBroken(
        f"{what} differ at {index}: {actual.flatten()[worst].item()!r} and {expected.flatten()[worst].item()!r}"
        f" (allowed {tolerance:g})"
    )


def require_within(actual: Tensor, expected: Tensor, what: str, error: float) -> None:
    """Raise `LawBroken` unless the shapes are equal and no element differs by more than `error`, an absolute value."""
    require(actual.shape == expected.shape, f"{what}: shapes {tuple(actual.shape)} and {tuple(expected.shape)} differ")
    off = (actual.detach().double() - expected.detach().double()).abs()
    require(bool((off <= error).all()), f"{what} differ by up to {off.max().item():g} (allowed {error:g})")


class Law:
    """Base class of a law. Its `test_` methods take a `case`, one configuration under test, or the whole `subject`.

    `cases_at_most` limits a slow law to that many cases. A run without `--every-case` has at most `usual_cases`, if
    given, and half of a slow law's.
    Which they are differs by law and subject, so that together all are tested; None checks every case.
    """

    cases_at_most: ClassVar[int | None] = None
    usual_cases: ClassVar[int | None] = None

    @classmethod
    def excuse(cls, case: Any) -> str | None:
        """Why the law does not apply to this case; None if it does."""
        return None

    @classmethod
    def parts(cls, case: Any) -> frozenset[object] | None:
        """What a slow law tests of a case: a run of several test classes leaves out cases whose parts were all tested
        in others. None: every case is tested."""
        return None

    @classmethod
    def title(cls) -> str:
        """The law's name: that of its class in snake case, such as `causality_by_gradient` or `kv_sharing`."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    @classmethod
    def checks(cls) -> list[str]:
        """The names of the test methods that the law itself defines."""
        return [name for name in vars(cls) if name.startswith("test_")]

    @classmethod
    def applicable(cls, cases: list[Any], subject: str = "", *, every: bool = True) -> tuple[list[Any], str]:
        """The cases to check, and the reason if there are none.

        If not all are checked, the first is one that differs by law and `subject`, a name, and each further one is
        the least like those before: another mode, width and number of heads.
        """
        most = len(cases) if cls.cases_at_most is None else cls.cases_at_most
        if not every and cls.usual_cases is not None:
            most = min(cls.usual_cases, most if cls.cases_at_most is None else -(-most // 2))
        left = sorted(cases, key=lambda case: zlib.crc32(f"{cls.title()} {subject} {case.label}".encode()))
        chosen: list[Any] = []
        reasons: set[str] = set()
        met: set[str] = set()
        while left and len(chosen) < most:
            case = min(left, key=lambda case: len(met.intersection(case.label.split("-"))))
            left.remove(case)
            if (excuse := cls.excuse(case)) is None:
                chosen.append(case)
                met.update(case.label.split("-"))
            else:
                reasons.add(excuse)
        if chosen:
            return sorted(chosen, key=cases.index), ""
        return [], "; ".join(sorted(reasons)) or "there are no cases"

    @classmethod
    def covering(cls, cases: list[Any]) -> list[Any]:
        """Some of the cases that together have every part (`parts`) that any has.

        By default, parts are modes, sizes and features: the words of labels. The cases differ by law, so that features
        meet one another.
        """
        met: set[object] = set()
        found: list[Any] = []
        for case in sorted(cases, key=lambda case: zlib.crc32(f"{cls.title()} {case.label}".encode())):
            parts = cls.parts(case)
            parts = frozenset(case.label.split("-")) if parts is None else parts
            if not found or not parts <= met:
                met |= parts
                found.append(case)
        return sorted(found, key=cases.index)


class MechanismLaw(Law):
    """A law of mechanisms; it only applies to mechanisms with all capabilities in `needs`."""

    needs: ClassVar[tuple[Capability, ...]] = ()
    usual_cases = 2

    @classmethod
    def excuse(cls, case: Any) -> str | None:
        missing = [capability.name for capability in cls.needs if not case.mechanism.can(capability)]
        if missing:
            return f"{case.mechanism.name} does not declare {' and '.join(missing)}"
        return cls.silent_on(case)

    @classmethod
    def silent_on(cls, case: Any) -> str | None:
        """Why the law does not apply to a case although its mechanism has all `needs`; None if it does."""
        return None
