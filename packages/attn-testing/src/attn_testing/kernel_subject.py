"""A kernel under test and the problems that it accepts."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import AttendKernel, AttendProblem, reach_of

from attn_testing import oracle
from attn_testing.problems import HEAD_MASKS, LENGTH_MASKS, MASK_KINDS, MASKS

HEADS = ((4, 4), (1, 1), (4, 2), (4, 1), (3, 1), (8, 2))
"""The numbers of (query, key/value) heads that are tried."""

VALUES: Mapping[str, tuple[Any, ...]] = {
    "score": oracle.SCORES,
    "modifiers": ((), *((kind,) for kind in oracle.MODIFIERS), ("alibi", "soft_cap")),
    "mask": MASK_KINDS,
    "distribution": oracle.DISTRIBUTIONS,
    "key_size": (16, 8, 5, 64, 128),
    "value_size": (16, 8, 3, 64, 128),
    "irregular_groups": (False, True),
    "head_masks": (False, True),
    "length_bound": (False, True),
    "padded": (False, True),
    "has_positions": (False, True),
    "kv_unordered": (False, True),
    "gradients": (False, True),
    "dtype": ("float32", "float64", "bfloat16", "float16"),
}
"""The values that are tried for each field of a problem; operands for all of these problems can be generated."""

STRANGE: Mapping[str, Any] = {
    "score": "unheard_of",
    "modifiers": ("unheard_of",),
    "mask": "unheard_of",
    "distribution": "unheard_of",
    "dtype": "float1",
    "device": "abacus",
    "key_size": 10**9 + 7,
    "value_size": 10**9 + 7,
}
"""Values that every kernel must refuse, unless it declares `Anything` for the field."""

MASKS_WITH = {"head_masks": HEAD_MASKS, "length_bound": LENGTH_MASKS}
"""The kinds of masks for which these fields are true."""
MASK_WITH = {"head_masks": "per_head", "length_bound": "neighbourhood"}

FLAGS = ("irregular_groups", "padded", "has_positions", "kv_unordered", "gradients")
"""Boolean fields whose name appears in the label of a problem if they are true."""

RANDOM_PROBLEMS = 12


@dataclass(frozen=True, eq=False)
class KernelCase:
    """A kernel and one problem that it accepts."""

    kernel: AttendKernel
    problem: AttendProblem
    label: str

    @property
    def absent(self) -> str | None:
        """Why the kernel cannot run on this machine; None if it can."""
        return self.kernel.available()


@dataclass(frozen=True, eq=False)
class KernelSubject:
    """A kernel under test, given by name or as an object."""

    given: str | AttendKernel

    @cached_property
    def kernel(self) -> AttendKernel:
        """The kernel; raises `UnknownName` if no plugin offers it, `InvalidValue` if it is not an `attend` kernel."""
        found = installed().kernels.get(self.given) if isinstance(self.given, str) else self.given
        if not isinstance(found, AttendKernel):
            raise InvalidValue.of("kernel", found.name, "an AttendKernel")
        return found

    @cached_property
    def base(self) -> AttendProblem:
        """The simplest problem that the kernel accepts."""
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        for device in devices:
            for dtype in VALUES["dtype"]:
                for size, mask in itertools.product((16, 64, 128), VALUES["mask"]):
                    plain = AttendProblem(key_size=size, value_size=size, dtype=dtype, device=device)
                    plain = with_field(plain, "mask", mask)
                    if not self.kernel.refusals(plain):
                        return plain
        return AttendProblem(key_size=16, value_size=16)

    @cached_property
    def cases(self) -> list[KernelCase]:
        """The accepted problems: each value of each field alone, then random combinations."""
        problems = dict.fromkeys(p for p in self._tried() if not self.kernel.refusals(p))
        return [KernelCase(self.kernel, problem, label_of(problem)) for problem in problems]

    def _tried(self) -> Iterator[AttendProblem]:
        yield self.base
        for field, values in VALUES.items():
            yield from (with_field(self.base, field, value) for value in values)
        for query, key_value in HEADS:
            yield dataclasses.replace(self.base, query_heads=query, key_value_heads=key_value)
        chance = random.Random(0)
        found = 0
        for _ in range(50 * RANDOM_PROBLEMS):
            query, key_value = chance.choice(HEADS)
            problem = dataclasses.replace(self.base, query_heads=query, key_value_heads=key_value)
            for field, values in VALUES.items():
                problem = with_field(problem, field, chance.choice(values))
            if not self.kernel.refusals(problem):
                found += 1
                yield problem
            if found == RANDOM_PROBLEMS:
                return


def with_field(problem: AttendProblem, field: str, value: Any) -> AttendProblem:
    """The problem with another value of one field, and with the other fields changed so that it stays consistent."""
    changed = dataclasses.replace(problem, **{field: value})
    if field in MASK_WITH and value != (changed.mask in MASKS_WITH[field]):
        changed = dataclasses.replace(changed, mask=MASK_WITH[field] if value else "full")
    bound: dict[str, Any] = {name: changed.mask in kinds for name, kinds in MASKS_WITH.items()}
    bound["reach"] = reach_of(MASKS[changed.mask]) if changed.mask in MASKS else 0
    has_positions = changed.has_positions or changed.kv_unordered
    changed = dataclasses.replace(changed, has_positions=has_positions, padded=changed.padded or has_positions, **bound)
    if changed.irregular_groups:
        changed = dataclasses.replace(changed, query_heads=3, key_value_heads=2)
    return changed


def label_of(problem: AttendProblem) -> str:
    """A label that distinguishes the problem, such as `causal-float32-h4/2-d16/16-padded`."""
    words = [problem.score, *problem.modifiers, problem.mask, problem.distribution, problem.dtype]
    words += [f"h{problem.query_heads}/{problem.key_value_heads}", f"d{problem.key_size}/{problem.value_size}"]
    words += [name for name in FLAGS if getattr(problem, name)]
    return "-".join(word for word in words if word not in {AttendProblem.score, AttendProblem.distribution})
