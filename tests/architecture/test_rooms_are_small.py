"""No file, function or signature outgrows its limit, and few files are too small to be about anything.

Exceptions are listed in exemptions.txt, which only shrinks, as does the number of small files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sources
from sources import Source

LIMITS = {"file": 500, "function": 50, "parameters": 7}
EXEMPTIONS = Path(__file__).with_name("exemptions.txt")
SMALL = 30
"""A source file of no more lines than this is a crumb: what it says belongs to the chapter that uses it."""
MOST_CRUMBS = 5
"""How many crumbs there are, `__init__.py` not counted. This number only falls."""


def measures(source: Source) -> Iterator[tuple[str, str, int]]:
    """(kind, name, size) of a file and of its functions."""
    yield "file", source.path, source.length
    for name, function in source.functions():
        if is_command(source):
            yield "function", f"{source.path}:{name}", lines_of(function) - lines_of_signature(function)
        else:
            yield "function", f"{source.path}:{name}", lines_of(function)
            yield "parameters", f"{source.path}:{name}", len(parameters(function))


def lines_of(function: sources.Function) -> int:
    """Lines of a function from its def to its end, without its docstring."""
    length = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        length -= (first.end_lineno or 0) - first.lineno + 1
    return length


def lines_of_signature(function: sources.Function) -> int:
    """Lines from the def to the body."""
    return function.body[0].lineno - function.lineno


def parameters(function: sources.Function) -> list[str]:
    """The names that a caller has to know: all but self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
    return [argument.arg for argument in every if argument.arg not in {"self", "cls"}]


def is_command(source: Source) -> bool:
    """Whether a file defines commands of the terminal: their signatures are lists of options with a help text each."""
    return any(module == "typer" for _, module in source.imports())


def oversized(files: Iterable[Source]) -> dict[tuple[str, str], int]:
    """What is larger than its limit, and how large it is."""
    return {(kind, name): size for source in files for kind, name, size in measures(source) if size > LIMITS[kind]}


def exempt() -> dict[tuple[str, str], int]:
    """The list as written: lines of `kind name size`."""
    lines = [line.split() for line in EXEMPTIONS.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return {(kind, name): int(size) for kind, name, size in lines}


def files_of_tests() -> list[Source]:
    """Test files count as files only: a table of cases may be long, and fixtures are parameters."""
    return [Source(source.path, "\n" * source.length) for source in sources.of_tests()]


def test_nothing_outgrows_its_limit_but_what_is_exempt_at_just_its_size() -> None:
    found = oversized([*sources.of_packages(), *sources.of_scripts(), *files_of_tests()])
    grown = {" ".join(key): size for key, size in found.items() if size > exempt().get(key, 0)}
    shrunk = {" ".join(key): found.get(key, 0) for key, size in exempt().items() if found.get(key, 0) < size}
    assert not grown, f"too large, limits are {LIMITS}: {grown}"
    assert not shrunk, f"smaller now; lower or remove these lines of {EXEMPTIONS.name}: {shrunk}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("file", "x = 1\n" * 501),
        ("function", "def f():\n" + "    x = 1\n" * 50),
        ("function", "class C:\n    async def f(self):\n" + "        x = 1\n" * 50),
        ("parameters", "def f(a, b, c, d, /, e, f, *, g, h): pass\n"),
        ("parameters", "def outer():\n    def f(a, b, c, d, e, f, *g, **h): pass\n"),
    ],
)
def test_one_over_the_limit_is_found(kind: str, text: str) -> None:
    assert [key[0] for key in oversized([Source("planted.py", text)])] == [kind]


def test_just_the_limit_is_allowed() -> None:
    text = 'def f(a, b, c, d, e, f, g):\n    """Long\n\n    docstring."""\n' + "    x = 1\n" * 49
    assert not oversized([Source("planted.py", text + "# end\n" * (500 - 53))])


def crumbs(files: Iterable[Source]) -> list[str]:
    """The paths of the files that are too small to be a chapter."""
    return [f.path for f in files if f.length <= SMALL and not f.path.endswith("/__init__.py")]


def test_no_more_files_are_crumbs_than_there_were() -> None:
    found = crumbs(sources.of_packages())
    assert len(found) <= MOST_CRUMBS, f"{len(found)} files of {SMALL} lines or fewer: {found}"
    assert len(found) == MOST_CRUMBS, f"fewer now: set MOST_CRUMBS to {len(found)}"


def test_a_crumb_is_found_and_a_chapter_is_not() -> None:
    files = [("a/small.py", SMALL), ("a/large.py", SMALL + 1), ("a/__init__.py", 1)]
    assert crumbs(Source(path, "x = 1\n" * lines) for path, lines in files) == ["a/small.py"]
