"""Measured times of kernels, in one file per model of GPU: written by `attn tune`, or shipped with this package.

A file records the device, the versions, the shape, and for each kind of call the microseconds that each kernel took.
Kernels are compared by these times where a call is similar to a measured one, else by the costs that they predict.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attn_core.errors import cleaning_up
from attn_core.kernels import devices
from attn_core.kernels.base import Problem

log = logging.getLogger(__name__)

FOLDER = "ATTN_TUNING"
"""Environment variable: the folder of this machine's measurements; by default, attn in the user's cache folder."""

SHIPPED = Path(__file__).parent / "costs"
"""Measurements that come with this package."""

PLAIN = "plain"
"""The kernel whose time is the unit of costs."""

ALIKE = 1.0
"""The largest ratio, in powers of two, of the densities of two masks of one kind that share measurements."""


@dataclass(frozen=True, kw_only=True)
class MeasuredCall:
    """A kind of call that is measured. `queries` is 1, or equal to `keys`; `density` is as in `AttendProblem`."""

    operation: str
    dtype: str
    head_dim: int
    mask: str
    gradients: bool
    queries: int
    keys: int
    density: float = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """The microseconds of each kernel, by name, for a kind of call; None for a kernel that failed."""

    call: MeasuredCall
    microseconds: Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTable:
    """The measurements on a model of GPU; `origin` records the versions, the date and the shape."""

    device: str
    capability: tuple[int, int]
    origin: Mapping[str, str]
    rows: tuple[Times, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> CostTable:
        """Build the table from a file's content; raises `KeyError`, `TypeError` or `ValueError` if that is invalid."""
        major, minor = map(int, content["capability"])
        rows = []
        for row in content["rows"]:
            times = {str(name): None if time is None else float(time) for name, time in row["microseconds"].items()}
            if any(time is not None and not 0 < time < math.inf for time in times.values()):
                raise ValueError(f"times must be positive and finite: {times}")
            fields = {name: value for name, value in row.items() if name != "microseconds"}
            rows.append(Times(call=MeasuredCall(**fields), microseconds=times))
        device, origin = str(content["device"]), dict(content["origin"])
        return cls(device=device, capability=(major, minor), origin=origin, rows=tuple(rows))

    def content(self) -> dict[str, Any]:
        """The content of a file with this table."""
        rows = [{**asdict(row.call), "microseconds": dict(row.microseconds)} for row in self.rows]
        return {
            "device": self.device,
            "capability": list(self.capability),
            "origin": dict(self.origin),
            "rows": rows,
        }

    def share(self, asked: MeasuredCall, kernel: str) -> float | None:
        """The time of a kernel relative to the plain computation's, infinite where it failed; None if not known."""
        row = self.nearest(asked, kernel)
        if row is None:
            return None
        time, plain = row.microseconds[kernel], self.plain(row.call)
        if time is None:
            return math.inf
        return None if plain is None else time / plain

    def nearest(self, asked: MeasuredCall, kernel: str) -> Times | None:
        """The measurement of this kernel for the most similar call by `distance`; None if no call is comparable."""
        alike = [row for row in self.rows if kernel in row.microseconds and comparable(row.call, asked)]
        return min(alike, key=lambda row: distance(row.call, asked), default=None)

    def plain(self, call: MeasuredCall) -> float | None:
        """The plain computation's time; where it was not measured, as its scores did not fit into memory, the time for
        the nearest number of keys, scaled by the number of pairs."""
        known = [
            (row.call.keys, time)
            for row in self.rows
            if (time := row.microseconds.get(PLAIN)) is not None and comparable(row.call, call, exactly=True)
        ]
        if not known:
            return None
        keys, time = min(known, key=lambda found: abs(math.log2(found[0] / call.keys)))
        return time * (call.keys / keys) ** (1 if call.queries == 1 else 2)


def comparable(measured: MeasuredCall, asked: MeasuredCall, *, exactly: bool = False) -> bool:
    """Whether a measured call applies to another one: they may differ in lengths and, unless `exactly`, in the size of
    heads, with densities within `ALIKE`; with `exactly`, in any density."""
    same = ("operation", "dtype", "mask", "gradients", *(("head_dim",) if exactly else ()))
    if any(getattr(measured, name) != getattr(asked, name) for name in same):
        return False
    if (measured.queries == 1) != (asked.queries == 1):
        return False
    return exactly or abs(math.log2(measured.density / asked.density)) <= ALIKE


def distance(measured: MeasuredCall, asked: MeasuredCall) -> tuple[float, float]:
    """How far a measured call is from another one: by the size of heads, of which larger ones are preferred, then by
    the number of keys, both in powers of two."""
    heads = math.log2(measured.head_dim / asked.head_dim)
    return (heads if heads >= 0 else 1 - heads), abs(math.log2(measured.keys / asked.keys))


def measured_share(problem: Problem, kernel: str) -> tuple[float | None, str | None]:
    """The measured cost of a kernel for a problem, and the device it was measured on; None and None if not measured."""
    if problem.device != "cuda":
        return None, None
    asked, table = problem.measured_as(), table_here()
    if asked is None or table is None:
        return None, None
    relative_time = table.share(MeasuredCall(**asked), kernel)
    return relative_time, None if relative_time is None else table.device


@cache
def table_here() -> CostTable | None:
    """The measurements for this machine's GPU: the user's, else shipped ones for its name or compute capability."""
    gpu = devices.nvidia_gpu()
    if gpu is None:
        return None
    found = read(path_of(gpu))
    if found is not None:
        return found
    shipped = [table for path in sorted(SHIPPED.glob("*.json")) if (table := read(path)) is not None]
    named = [table for table in shipped if table.device == gpu.name]
    return next(iter(named + [table for table in shipped if table.capability == gpu.capability]), None)


def path_of(gpu: devices.Gpu) -> Path:
    """The path of the measurements of `attn tune` on this model of GPU."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attn"
    return Path(os.environ.get(FOLDER) or home) / f"costs-{slug(gpu.name)}.json"


def slug(name: str) -> str:
    """The name of a device as part of a file name, such as nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read(path: Path) -> CostTable | None:
    """Read the table of a file; None if there is no file or, with a warning, if its content is invalid."""
    try:
        return CostTable.of(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is ignored, predicted costs are used instead: %s: %s", path, type(error).__name__, error)
        return None


def write(path: Path, table: CostTable) -> Path:
    """Write the table to `path`, atomically, for use from now on; returns `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text_of(table))
        Path(name).replace(path)
    except BaseException:
        with cleaning_up("the partial table"):
            Path(name).unlink(missing_ok=True)
        raise
    table_here.cache_clear()
    return path


def text_of(table: CostTable) -> str:
    """The table as JSON with one line for each kind of call."""
    content = table.content()
    rows: Iterable[str] = (json.dumps(row) for row in content.pop("rows"))
    head = json.dumps(content, indent=1).removesuffix("\n}")
    return head + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n"
