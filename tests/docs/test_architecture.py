"""The map of the tree names files that exist, terms few enough to learn, and imports as they are declared."""

import itertools
import re

import architecture_page
import pytest
import workspace

PAGE = architecture_page.PAGE
TEXT = PAGE.read_text("utf-8")
MOST_TERMS = 25
FLOWS = ("From spec to kernel", "From prompt to token and back", "From job to checkpoint and model")
PATH = re.compile(r"`([a-z_.][\w.-]*(?:/[\w.-]+)+/?)`")


def missing(text):
    """The paths in a text that are neither of the repository nor of a package's sources."""
    bases = [workspace.ROOT, *(package.source for package in workspace.packages().values())]
    return [path for path in PATH.findall(text) if not any((base / path).exists() for base in bases)]


def section(name):
    return re.search(rf"^## {re.escape(name)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]


def test_every_file_that_the_map_names_exists():
    assert missing(TEXT) == []


def test_a_file_that_is_not_there_is_found():
    assert missing("`attn_core/spec.py`, `docs/claims.md`, `attn_core/no.py`, `proto/none.md`") == [
        "attn_core/no.py",
        "proto/none.md",
    ]


@pytest.mark.parametrize("flow", FLOWS)
def test_a_flow_has_a_picture_and_a_table_of_files_in_order(flow):
    text = section(flow)
    assert "```" in text
    rows = re.findall(r"^\| (\d+) \| `", text, re.MULTILINE)
    assert len(rows) >= 10
    assert all(int(row) in (1, int(before) + 1) for before, row in itertools.pairwise(rows))


def test_the_glossary_can_be_learned_and_is_the_only_one():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section("Glossary"), re.MULTILINE)
    terms = [row for row in rows if row not in {"term", "---"}]
    assert 10 < len(terms) <= MOST_TERMS
    others = [path for path in workspace.ROOT.glob("docs/*.md") if path != PAGE]
    assert not [path.name for path in others if "## Glossary" in path.read_text("utf-8")]


def test_what_may_import_what_is_as_declared():
    assert architecture_page.page(TEXT) == TEXT, "run python tools/architecture_page.py"
