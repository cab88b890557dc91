"""Each mechanism has its page, and each page says what the mechanism declares."""

from __future__ import annotations

import mechanism_pages
import workspace
from attn_core import installed


def test_the_pages_are_those_that_the_mechanisms_declare() -> None:
    present = {path.name: path.read_text("utf-8") for path in mechanism_pages.FOLDER.glob("*.md")}
    wanted = mechanism_pages.pages()
    stale = {name for name in present.keys() | wanted.keys() if present.get(name) != wanted.get(name)}
    assert not stale, "run python tools/mechanism_pages.py"


def test_every_mechanism_of_this_tree_has_a_page_with_its_equation() -> None:
    mechanisms = installed().mechanisms
    names = [name for name in mechanisms.names() if mechanisms.owner(name) in workspace.packages()]
    assert len(names) >= 12
    for name in names:
        assert mechanisms.get(name).equation in (mechanism_pages.FOLDER / f"{name}.md").read_text("utf-8")
