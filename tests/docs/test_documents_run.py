"""The Python in our documents runs as written, and the commands they show exist."""

import re
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


def test_the_first_thing_that_readme_shows_is_how_to_use_it_from_python():
    text = (ROOT / "README.md").read_text("utf-8")
    first = text.index("```python")
    assert first < text.index("```\n")
    assert text[:first].count("\n") < 20
    for use in ("attn_variants.layer(", "attend(", "attn_variants.MultiheadAttention("):
        assert use in text[: text.index("nox -s demo")]


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
