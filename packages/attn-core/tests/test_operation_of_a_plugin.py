"""A plugin brings an operation of its own: it is dispatched, explained and fail-closed as those of this tree are."""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

PLUGIN = """
from dataclasses import dataclass
from typing import ClassVar

from attn_core import hookimpl
from attn_core.kernels.base import Anything, AtMost, Kernel, Problem


@dataclass(frozen=True, kw_only=True)
class TopKProblem(Problem):
    operation: ClassVar[str] = "top_k"
    priced: ClassVar[frozenset[str]] = frozenset({"rows"})
    k: int = 1
    sorted: bool = False
    rows: int = 0


class TopKKernel(Kernel[TopKProblem]):
    problem = TopKProblem

    def run(self, numbers, k):
        return sorted(numbers, reverse=True)[:k]


class Sorting(TopKKernel):
    name = "sorting"
    summary = "sorts all"
    accepts = {"k": Anything(), "sorted": Anything()}

    def cost(self, problem):
        return 1.0


class Scanning(TopKKernel):
    name = "scanning"
    summary = "keeps the largest"
    accepts = {"k": AtMost(2)}

    def cost(self, problem):
        return 0.1 if problem.rows > 100 else 0.5


@hookimpl
def attn_kernels():
    return [Sorting(), Scanning()]
"""

ASK = """
import dataclasses, json
from attn_core import installed
from attn_core.kernels.attend import AttendProblem
from attn_core.kernels.dispatch import Operation, choose, explain
from attn_top_k import TopKKernel, TopKProblem

kernels = installed().kernels
operation = Operation(kernels, TopKKernel)
verdicts = explain(kernels, TopKProblem(k=2, sorted=True))

@dataclasses.dataclass(frozen=True, kw_only=True)
class Later(TopKProblem):
    largest: bool = True

print(json.dumps({
    "found": [choose(kernels, problem).name for problem in (TopKProblem(k=2), TopKProblem(k=3), TopKProblem(rows=999))],
    "run": operation.require(k=2).run([3, 9, 4], 2),
    "operation": [operation.require(k=2).name, operation.require(k=7).name, operation.find(below=1.0, k=7) is None],
    "reasons": {verdict.kernel.name: list(verdict.reasons) for verdict in verdicts},
    "attend": [kernels.get("sorting").refusals(AttendProblem()), kernels.get("sorting").refusals(Later())],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "attn_top_k.py").write_text(PLUGIN)
    info = folder / "attn_top_k-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: attn-top-k\nVersion: 1.0\nRequires-Dist: attn-core>={version('attn-core')}\n"
    )
    (info / "entry_points.txt").write_text("[attn.plugins]\nattn-top-k = attn_top_k\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    env["ATTN_PLUGINS"] = "attn-top-k"
    done = subprocess.run([sys.executable, "-c", ASK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_dispatched(found):
    assert found["found"] == ["scanning", "sorting", "scanning"]
    assert found["run"] == [9, 4]
    assert found["operation"] == ["scanning", "sorting", True]


def test_it_is_explained(found):
    assert found["reasons"] == {"sorting": [], "scanning": ["sorted: must be False, not True"]}


def test_it_is_fail_closed(found):
    assert found["attend"] == [
        ["operation: computes top_k, not attend"],
        ["operation: accepts a TopKProblem, not a Later, which may have more fields"],
    ]
