"""The public names of every package are those on record beside this file."""

from __future__ import annotations

from difflib import unified_diff
from pathlib import Path

import public_api
import pytest
import workspace

HERE = Path(__file__).parent
UPDATE = "if that is meant: python tools/public_api.py, and a fragment in changelog.d"


@pytest.mark.parametrize("name", workspace.packages())
def test_the_public_names_are_those_on_record(name: str) -> None:
    record = HERE / f"{name}.txt"
    before = record.read_text("utf-8").splitlines() if record.exists() else []
    now = public_api.surface(workspace.packages()[name]).splitlines()
    changes = list(unified_diff(before, now, "on record", "in the code", lineterm="", n=0))
    assert not changes, "\n".join([UPDATE, *changes])


def test_no_record_outlives_its_package() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} <= set(workspace.packages())


@pytest.fixture
def planted(tmp_path: Path) -> workspace.Package:
    folder = tmp_path / "src" / "planted"
    (folder / "parts").mkdir(parents=True)
    (folder / "__init__.py").write_text('from planted.plain import f\n__all__ = ["f"]\n')
    (folder / "plain.py").write_text(
        "import os\nLIMIT: int = 3\n_hidden = 4\n"
        "def f(a, /, b, c=1, *more, d, e=2, **rest): pass\n"
        "class C:\n    size: int\n    async def go(self, *, far=1): pass\n    def _stay(self): pass\n"
    )
    (folder / "parts" / "__init__.py").write_text("")
    (folder / "parts" / "inner.py").write_text("def inner(): pass\n")
    (folder / "_private.py").write_text("def g(): pass\n")
    return workspace.Package(
        name="planted", folder=tmp_path, version="1", imports=("planted",), needs=(), extras=(), test_needs=()
    )


def test_a_record_has_exports_definitions_parameters_and_members_and_nothing_private(
    planted: workspace.Package,
) -> None:
    assert public_api.surface(planted).splitlines()[1:] == [
        "planted.f",
        "planted.plain.C",
        "planted.plain.C.go(*, far=)",
        "planted.plain.C.size",
        "planted.plain.LIMIT",
        "planted.plain.f(a, /, b, c=, *more, d, e=, **rest)",
    ]
