"""Each mechanism has its page, and each page says what the mechanism declares."""

from __future__ import annotations

import re

import mechanism_pages
import workspace
from attn_core import installed
from attn_core.options import option_fields
from cases import each

LOCAL = [name for name in installed().mechanisms.names() if installed().mechanisms.owner(name) in workspace.packages()]


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


@each("name", LOCAL)
def test_a_page_explains_the_idea_in_three_paragraphs_and_says_when_to_use_it(name: str) -> None:
    idea = installed().mechanisms.get(name).idea
    assert len(idea) == 4
    assert idea[-1].startswith("Use it")
    assert all(len(part.split()) >= 8 for part in idea)


@each("name", LOCAL)
def test_the_program_on_a_page_runs(name: str) -> None:
    code = re.search(r"```python\n(.*?)```", mechanism_pages.example_code(installed().mechanisms.get(name)), re.DOTALL)
    assert code
    exec(compile(code[1].replace("print(", "str("), name, "exec"), {})  # noqa: S102 -- a program of our own page


@each("name", LOCAL)
def test_a_page_says_what_every_option_means_and_allows(name: str) -> None:
    mechanism = installed().mechanisms.get(name)
    meaning = mechanism_pages.meanings(mechanism) if option_fields(mechanism) else ""
    for option in option_fields(mechanism):
        assert f"`{option}`" in meaning, option
        assert mechanism_pages.allowed(mechanism, option), option
