"""No module imports one that imports it, late imports and those of types included."""

from __future__ import annotations

import attn_core
import import_graph
import pytest
import workspace
from sources import Source

MOST_NAMES_OF_THE_CONTRACT = 40


def found() -> set[tuple[str, ...]]:
    """The circles of every package, each as the sorted names of its modules."""
    packages = workspace.packages().values()
    return {circle for package in packages for circle in import_graph.circles(import_graph.of_package(package))}


def test_there_is_no_circle_of_imports() -> None:
    assert not found(), "\n".join(f"these import one another: {' '.join(circle)}" for circle in sorted(found()))


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
