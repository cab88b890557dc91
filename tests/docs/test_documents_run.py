"""The Python in our documents runs as written, and the commands they show exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *(path for path in ROOT.glob("docs/*.md") if path.name != "tutorial.md"),
    *(path for path in ROOT.glob("docs/start/*.md") if path.name != "notebook.md"),
    *ROOT.glob("plugins/*/README.md"),
    ROOT / "packages/attn-variants/README.md",
    ROOT / "packages/attn-experiments/README.md",
]
"""Those whose Python needs nothing that the reader was to bring, but a server where it makes a `Client()`.

The tutorial needs the package that it writes: `test_walkthroughs.py` runs it. `test_course.py` runs the course, and
`test_notebook.py` the notebook.
"""

WRITTEN = sorted(
    {
        *DOCUMENTS,
        *ROOT.glob("docs/course/*.md"),
        ROOT / "docs/tutorial.md",
        *ROOT.glob("packages/*/README.md"),
        *ROOT.glob("services/*/README.md"),
    }
)


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_of_a_document_runs_from_top_to_bottom(path, tmp_path):
    program = "\n".join(block for block in blocks(path, "python") if "Client()" not in block)
    ran = warm.run(program, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


README = ROOT / "README.md"
WITHOUT_A_MODEL, WITH_A_MODEL = blocks(README, "sh")


def test_readme_begins_with_a_reason_a_picture_and_a_measurement_and_then_python():
    text = README.read_text("utf-8")
    places = [text.index(part) for part in ("![", "| requests at once |", "**Do not**", "```python", "## Install")]
    assert places == sorted(places)
    assert text[: places[3]].count("\n") < 40
    assert (ROOT / re.search(r"!\[.*\]\((.*)\)", text)[1]).is_file()
    for use in ("attn_variants.layer(", "attend(", "attn_variants.MultiheadAttention("):
        assert use in text[: places[4]]


@pytest.mark.parametrize("block", blocks(README, "python"))
def test_a_block_of_readme_works_when_it_is_pasted_alone(block, tmp_path):
    ran = warm.run(block, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr


def pasted(lines, folder, home):
    """What a shell prints that runs these lines and stops at the first that fails."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {**os.environ, "PATH": path, "ATTN_HOME": str(home), "COLUMNS": "80"}
    return subprocess.run(
        ["bash", "-e"], input=lines, cwd=folder, env=given, capture_output=True, text=True, check=False, timeout=280
    )


def test_the_commands_of_readme_that_need_no_model_work_when_they_are_pasted(tmp_path):
    ran = pasted(WITHOUT_A_MODEL, tmp_path, tmp_path)
    assert ran.returncode == 0, ran.stderr
    for said in ("window=4", "sliding", "torch_sdpa"):
        assert said in ran.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_the_commands_of_readme_with_a_model_work_when_they_are_pasted(tmp_path):
    lines = WITH_A_MODEL.splitlines()
    assert lines[-1].startswith("attn serve")  # which would not end
    ran = pasted("\n".join(lines[:-1]), tmp_path, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "Paris" in ran.stdout
    several = re.split(r"^--- \d$", ran.stdout, flags=re.MULTILINE)[1:]
    assert len({text.split("Next token")[0].strip() for text in several}) == 4


def commands(path):
    """The calls of `attn` in the blocks of a document, as words; comments, prompts and further programs cut off."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    text = "\n".join(block for language, block in found if language in {"", "console", "sh"})
    for line in text.splitlines():
        for part in re.split(r"&& | {3,}| [|<] ", line.partition(" #")[0]):
            if (typed := part.strip().removeprefix("$ ")).startswith("attn "):
                yield re.sub(r"[][]|\.\.\.", "", typed).split()


TYPED = sorted(
    {
        (*[word for word in words[1:3] if re.fullmatch("[a-z]+", word)], *re.findall(r"--[a-z-]+", " ".join(words)))
        for path in [ROOT / "CONTRIBUTING.md", *WRITTEN]
        for words in commands(path)
    }
)
HELP = {}


def help_of(*names):
    """What `attn NAMES --help` prints, wide enough that no option is cut."""
    if names not in HELP:
        environment = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
        HELP[names] = warm.attn(*names, "--help", environ=environment).stdout
    return HELP[names]


@pytest.mark.parametrize("typed", TYPED, ids=" ".join)
def test_a_command_that_a_document_shows_exists_with_its_options(typed):
    names = [word for word in typed if not word.startswith("-")]
    shown = help_of(*names) if names[:1] in (["models"], ["jobs"], ["data"]) else help_of(*names[:1])
    if "--train" in typed:  # which hands over to another command
        shown += help_of("compare-training")
    assert "Usage" in shown
    assert [word for word in typed if word.startswith("-") and word not in shown] == []
