"""The numerics of every program, on the CPU: a process that interprets them cannot compile, so it is another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).with_name("interpreted")
FILES = [path.stem for path in sorted(FOLDER.glob("test_*.py"))]
NIGHTLY = {"test_engine_step"}
"""What takes more than a minute."""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """How many tests of each file ended how; one process runs all wanted files, for each would import torch."""
    items = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    files = [str(FOLDER / f"{name}.py") for name in sorted(wanted)]
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        request.config.option.markexpr,
        "--junitxml",
        str(report),
    ]
    command = [sys.executable, "-m", "pytest", *options, "--junitxml", str(report), *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:] + done.stderr[-2000:])
    found: dict[str, Counter[str]] = {name: Counter() for name in wanted}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 -- written by the line above
        outcome = next((child.tag for child in case if child.tag in {"failure", "error", "skipped"}), "passed")
        found[case.attrib["classname"].split(".")[-1]][outcome] += 1
    return found


# The time is that of all files, which is the time of the first.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name in NIGHTLY)) for name in FILES]
)
def test_interpreted_programs_compute_what_is_defined(name: str, outcomes: dict[str, Counter[str]]) -> None:
    assert outcomes[name]["passed"] > 0
    assert not outcomes[name]["failure"] + outcomes[name]["error"], outcomes[name]


UNREPAIRED = """
import torch
from attn_core import installed
from attn_variants import attend
asked = 0
for kernel in installed().kernels:
    if type(kernel).__module__.startswith("attn_kernels_triton") and "dtype" in kernel.accepts:
        asked += 1
        assert kernel.accepts["dtype"].refuses("bfloat16"), kernel.name
assert asked >= 8, asked
torch.manual_seed(0)
rows = [torch.randn(1, 2, 20, 32).bfloat16() for _ in range(3)]
exact = attend(*(part.double() for part in rows), kernel="plain")
assert (attend(*rows).double() - exact).abs().max() < 0.02
"""


def test_the_interpreter_is_not_given_types_that_it_computes_wrongly() -> None:
    """In a process that sets the variable and repairs nothing, as one who debugs a kernel of their own does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", UNREPAIRED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
