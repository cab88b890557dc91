"""No module imports one that imports it, late imports and those of types included; circles.txt lists what remains."""

from __future__ import annotations

from pathlib import Path

import attn_core
import import_graph
import pytest
import workspace
from sources import Source

REMAINING = Path(__file__).with_name("circles.txt")
MOST_NAMES_OF_THE_CONTRACT = 40


def found() -> set[tuple[str, ...]]:
    """The circles of every package, each as the sorted names of its modules."""
    packages = workspace.packages().values()
    return {circle for package in packages for circle in import_graph.circles(import_graph.of_package(package))}


def listed() -> set[tuple[str, ...]]:
    """The circles of circles.txt: a line each, names parted by spaces."""
    lines = REMAINING.read_text("utf-8").splitlines()
    return {tuple(line.split()) for line in lines if line and not line.startswith("#")}


def test_there_is_no_circle_of_imports_but_those_that_remain() -> None:
    new = found() - listed()
    gone = listed() - found()
    assert not new, "\n".join(f"these import one another: {' '.join(circle)}" for circle in sorted(new))
    assert not gone, "\n".join(f"broken up or smaller; mend {REMAINING.name}: {' '.join(c)}" for c in sorted(gone))


@pytest.mark.parametrize(
    "back",
    [
        "from p import a",
        "import p.a",
        "from p.a import name",
        "def late():\n    from p.a import name",
        "if TYPE_CHECKING:\n    from p.a import Name",
    ],
)
def test_a_circle_of_any_kind_of_import_is_found(back: str) -> None:
    texts = {"p": "", "p.a": "from p import c", "p.b": back, "p.c": "import p.b"}
    modules = {name: Source(f"{name}.py", text) for name, text in texts.items()}
    assert import_graph.circles(import_graph.graph(modules)) == [("p.a", "p.b", "p.c")]


def test_what_only_meets_again_further_down_is_no_circle() -> None:
    texts = {"p": "", "p.a": "from p import b, c", "p.b": "import p.d", "p.c": "from p.d import x", "p.d": "import p"}
    modules = {name: Source(f"{name}.py", text) for name, text in texts.items()}
    assert import_graph.circles(import_graph.graph(modules)) == []


def test_the_root_of_the_contract_fits_on_a_screen() -> None:
    names = attn_core.__all__
    assert len(names) <= MOST_NAMES_OF_THE_CONTRACT, f"{len(names)} names; put them into a submodule: {names}"
