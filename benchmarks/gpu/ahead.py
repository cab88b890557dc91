"""Do all programs that run.sh launches on an H200 compile for it without register spills, and how long does that take?

    python benchmarks/gpu/ahead.py [PART ...]

Runs on any machine. The parts of run.sh are called with the same operands as on a GPU, except for the numbers of
requests and of matrix rows; programs are compiled ahead of time for sm_90a and never launched. The results and times
that the parts report are discarded.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import correctness
import decoding
import rowwise
import torch
import training_step
import triton
from attn_core import AttentionInputs, AttentionSpec
from attn_kernels_triton import launch as launching
from everything import ROOT, TABLES, VERDICTS
from parts import Part
from report import RESULTS, write_report
from torch import Tensor

WITHOUT_A_GPU = (
    "attn_kernels_triton.checks",
    "attn_kernels_triton.attention.forward",
    "attn_kernels_triton.recurrence.compute",
    "attn_kernels_triton.recurrence.step_checks",
    "attn_kernels_triton.rowwise.rows",
    "attn_kernels_triton.paged.attend",
    "attn_kernels_triton.products",
)
"""The modules that check whether tensors on a CPU are allowed."""


class Compiler:
    """Compiles programs in place of launching them; `known` holds the compiled ones, by hash."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Any]] = {}

    def compile(self, launch: launching.Launch) -> None:
        """Compile the program of a launch and record it, if it is new."""
        if not launch.programs:
            return
        began = worked()
        options = {"num_warps": launch.warps, "num_stages": launch.stages}
        kernel = launch.program.warmup(launch.call, *launch.tiles, grid=(launch.programs,), **options)
        took = worked() - began
        if kernel.hash not in self.known:
            self.known[kernel.hash] = {"program": launch.program.__name__, "seconds": took, **facts(kernel)}


def worked() -> float:
    """The processor seconds of this process and of its child processes that have ended."""
    return sum(os.times()[:4])


def facts(kernel: Any) -> dict[str, int]:
    """The registers and stack bytes (spills) of each thread, and the bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        said = importlib.import_module("artefacts").output("cuobjdump", "--dump-resource-usage", file.name)
    numbers = dict(part.split(":") for part in said.split() if part.startswith(("REG:", "STACK:")))
    return {"registers": int(numbers["REG"]), "stack": int(numbers["STACK"]), "shared": kernel.metadata.shared}


def measured(part: Part) -> dict[str, Any]:
    """Run one part and return a row that describes the programs it compiled."""
    compiler = Compiler()
    launching.Launch.run = lambda launch, _: compiler.compile(launch)  # type: ignore[method-assign]
    for _ in part.rows("cpu", small=False):
        pass
    found = list(compiler.known.values())
    return {
        "part": part.name,
        "programs": len(found),
        "processor_seconds": round(sum(one["seconds"] for one in found), 1),
        "most_processor_seconds": round(max((one["seconds"] for one in found), default=0.0), 1),
        "most_registers": max((one["registers"] for one in found), default=0),
        "most_shared": max((one["shared"] for one in found), default=0),
        "spilling": [one for one in found if one["stack"]],
    }


def as_if_on_a_gpu() -> None:
    """Make the kernels accept CPU tensors as if on an H200, and reduce sizes that do not change the programs."""
    sys.path.append(str(ROOT / "packages" / "attn-kernels-triton" / "tests" / "compiled"))
    artefacts = importlib.import_module("artefacts")
    triton.runtime.driver.set_active(artefacts.Absent(artefacts.HOPPER))
    for name in WITHOUT_A_GPU:
        importlib.import_module(name).interpreted = lambda: True  # type: ignore[attr-defined]
    rowwise.JUDGED, rowwise.TIMED = (16, *rowwise.JUDGED[1:]), (64, *rowwise.TIMED[1:])
    decoding.TIMED[:] = map(shorter, decoding.TIMED)
    correctness.plain = nothing  # type: ignore[assignment]
    training_step.tables = step  # type: ignore[assignment]


def nothing(spec: AttentionSpec, operands: AttentionInputs) -> Tensor:
    """A cheap replacement of the plain computation, which is slow on a CPU and whose result is not used."""
    heads, learned = spec.heads, correctness.leaves(operands).values()
    shape = (*operands.query.shape[:2], heads.query, heads.value_size)
    return operands.query.new_zeros(shape) + sum(tensor.sum() for tensor in learned)


def shorter(one: decoding.Step) -> decoding.Step:
    """The same step with contexts of a sixteenth of the length."""
    if isinstance(one, decoding.TreeStep):
        return decoding.TreeStep.of(one.name, tuple(base // 16 for base in one.bases), form=one.form)
    return replace(one, contexts=tuple((past + 1) // 16 - 1 for past in one.contexts), shared=one.shared // 16)


def step(device: str, *, small: bool) -> Iterator[dict[str, Any]]:  # noqa: ARG001 -- as of a part
    """The attention of the timed training step; its loss kernels are compiled by `rowwise`."""
    shape = training_step.SHIPPED
    size = shape["width"] // shape["heads"]
    rows = torch.randn(shape["batch"], shape["length"], 3, shape["heads"], size).bfloat16().requires_grad_()
    training_step.ours(*rows.unbind(2)).sum().backward()
    yield {}


def main() -> None:
    """Compile all parts, or those named, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS / f"gpu-ahead-triton-{triton.__version__}.json")
    options = parser.parse_args()
    fresh = tempfile.mkdtemp()
    # Use empty folders, so that nothing compiled or tuned earlier is reused.
    os.environ.update({"TRITON_CACHE_DIR": fresh, "ATTN_TUNING": fresh, "TRITON_DEFAULT_FP_FUSION": "1"})
    as_if_on_a_gpu()
    parts = [
        *VERDICTS,
        *(table.part for table in TABLES if table.part.module not in {"chip", "beside_fla", "sanitizer"}),
    ]
    asked = (part for part in parts if not options.part or part.name in options.part)
    facts = {"question": __doc__, "triton": triton.__version__, "torch": torch.__version__, "target": "sm_90a"}
    write_report("gpu-ahead", facts, map(measured, asked), options.out)
    shutil.rmtree(fresh)


if __name__ == "__main__":
    main()
