"""The Python in our documents runs as written, and the commands they show exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("plugins/*/README.md"),
    ROOT / "packages/attn-variants/README.md",
]
"""Those whose Python needs nothing that the reader was to bring, but a server where it makes a `Client()`."""


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_of_a_document_runs_from_top_to_bottom(path, tmp_path):
    program = "\n".join(block for block in blocks(path, "python") if "Client()" not in block)
    ran = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_first_thing_that_readme_shows_is_how_to_use_it_from_python():
    text = (ROOT / "README.md").read_text("utf-8")
    first = text.index("```python")
    assert first < text.index("```\n")
    assert text[:first].count("\n") < 20
    for use in ("attn_variants.layer(", "attend(", "attn_variants.MultiheadAttention("):
        assert use in text[: text.index("nox -s demo")]


def test_every_subcommand_that_the_tutorial_types_exists_with_its_options():
    lines = "".join(blocks(ROOT / "docs" / "tutorial.md", "console")).splitlines()
    typed = [shlex.split(line.removeprefix("$ ").removesuffix("&")) for line in lines]
    for words in [words for words in typed if words[0] == "attn"]:
        names = words[1:3] if words[1] == "models" else words[1:2]
        attn = str(Path(sys.executable).with_name("attn"))
        shown = subprocess.run(
            [attn, *names, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={"COLUMNS": "200", "NO_COLOR": "1"},
        )
        assert [word for word in words if word.startswith("--") and word not in shown.stdout] == []
