"""The map of the tree names files that exist, terms few enough to learn, and imports as they are declared."""

import re

import architecture_page
import flows
import pytest
import workspace

PAGE = architecture_page.PAGE
TEXT = PAGE.read_text("utf-8")
MOST_TERMS = 25
FLOWS = {
    "layer": ("From spec to kernel", 30),
    "chat": ("From prompt to token and back", 25),
    "job": ("From job to checkpoint and model", 40),
}
"""Of each flow the section that tells it, and how many files that may take."""
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


def told(flow):
    """The files in the second column of a flow's table, in its order."""
    rows = section(FLOWS[flow][0]).partition(f"<!-- flow: {flow} -->\n")[2].split("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    return [path for row in rows for path in PATH.findall(row.split("|")[2])]


def untrue(files, functions):
    """What a told flow does not run through, and the share of the functions it runs through that it tells."""
    run = {file for file, _ in functions}
    return [file for file in files if file not in run], sum(file in files for file, _ in functions) / len(functions)


# The job is nightly: its processes take fifteen seconds of processor time.
# The job is nightly: its processes take twenty seconds of processor time.
@pytest.mark.parametrize("flow", ["layer", "chat", pytest.param("job", marks=[pytest.mark.nightly, pytest.mark.slow])])
def test_a_flow_is_told_as_it_runs(flow, tmp_path):
    files = told(flow)
    assert "```" in section(FLOWS[flow][0])
    assert len(set(files)) == len(files) <= FLOWS[flow][1]
    trace = flows.Trace(tmp_path)
    flows.FLOWS[flow](trace)
    absent, share = untrue(files, trace.functions)
    assert not absent, "run python tools/flows.py"
    assert share > 1 / 3, f"the table tells {share:.0%} of the functions that run"


def test_a_flow_that_is_told_wrongly_is_found():
    run = [("a.py", "f"), ("b.py", "g"), ("b.py", "h"), ("c.py", "i")]
    assert untrue(["a.py", "d.py"], run) == (["d.py"], 0.25)


def test_the_glossary_can_be_learned_and_is_the_only_one():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section("Glossary"), re.MULTILINE)
    terms = [row for row in rows if row not in {"term", "---"}]
    assert 10 < len(terms) <= MOST_TERMS
    others = [path for path in workspace.ROOT.glob("docs/*.md") if path != PAGE]
    assert not [path.name for path in others if "## Glossary" in path.read_text("utf-8")]


def test_what_may_import_what_is_as_declared():
    assert architecture_page.page(TEXT) == TEXT, "run python tools/architecture_page.py"
