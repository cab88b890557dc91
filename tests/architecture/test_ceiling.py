"""The tree and its flows stay below the ceiling that ceiling.toml records."""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import sources
import workspace

CEILING = tomllib.loads(Path(__file__).with_name("ceiling.toml").read_text("utf-8"))
TO_BE_COPIED = {"attn-olmo2", "attn-plugin-template"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
TRACE = """
import sys, threading, torch
from pathlib import Path
seen, on = set(), False
def see(frame, event, argument):
    code = frame.f_code
    if on and event == "call" and "/src/attn" in code.co_filename and code.co_name != "<module>":
        seen.add((code.co_filename, code.co_qualname))
threading.setprofile(see)
sys.setprofile(see)
{flow}
print(len({{file for file, _ in seen}}), len(seen))
"""
FLOWS = {
    "layer": """
from attn_core import MechanismConfig, installed
layer = installed().mechanisms.get("mha").build(MechanismConfig(hidden_size=64, num_heads=4, head_dim=16))
x = torch.randn(1, 8, 64)
with torch.no_grad():
    layer(x)
    on = True
    layer(x)
    on = False
""",
    "local-chat": """
from attn_engine import LocalClient
from attn_schema.decoder import DecoderConfig
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import SamplingParams
tokenizer = character_tokenizer("abcdefgh ")
config = DecoderConfig(
    vocab_size=tokenizer.vocab_size, max_seq_len=64, hidden_size=32, num_layers=2, num_heads=4, mechanism="mha"
)
folder = Path(sys.argv[1]) / "tiny"
save_model(folder, Decoder(config), tokenizer)
with LocalClient() as client:
    for warm in (False, False, True):
        on = warm
        client.complete(str(folder), "abc", SamplingParams(temperature=0, max_new_tokens=8))
    on = False
""",
}


def code_lines(text: str) -> int:
    """Lines with a token that computes: no blanks, comments, docstrings or imports."""
    lines: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            statement.append(token)
        elif token.type == tokenize.NEWLINE:
            documents = all(part.type == tokenize.STRING for part in statement)
            if statement and not documents and statement[0].string not in {"import", "from"}:
                lines.update(line for part in statement for line in range(part.start[0], part.end[0] + 1))
            statement = []
    return len(lines)


def weight() -> dict[str, int]:
    """What the table `weight` limits, counted in this tree."""
    tree = workspace.packages()
    files = sources.of_packages()
    computing = [
        path for package in tree.values() for end in ("*.cpp", "*.hpp", "*.toml") for path in package.source.rglob(end)
    ]
    computing += (workspace.ROOT / "tools").glob("*.py")
    return {
        "packages": sum(not package.is_plugin or name in TO_BE_COPIED for name, package in tree.items()),
        "source-lines": sum(source.length for source in files),
        "code-lines": sum(code_lines(source.text) for source in files),
        "computing-lines": sum(len(path.read_text("utf-8").splitlines()) for path in computing),
    }


def flow(name: str, folder: Path) -> dict[str, int]:
    """How many files and functions of ours a flow runs through."""
    program = TRACE.format(flow=FLOWS[name])
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files, functions = map(int, done.stdout.split()[-2:])
    return {"files": files, "functions": functions}


def test_the_tree_is_below_its_ceiling() -> None:
    over = {
        name: (found, CEILING["weight"][name]) for name, found in weight().items() if found > CEILING["weight"][name]
    }
    assert not over, f"counted and allowed: {over}"


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_is_below_its_ceiling(name: str, tmp_path: Path) -> None:
    found = flow(name, tmp_path)
    assert found["files"] > 0
    assert found["files"] <= CEILING["flows"][name]["files"], found
    assert found["functions"] <= CEILING["flows"][name]["functions"], found


def test_lines_that_compute_are_counted() -> None:
    text = '"""Doc\n\nmore."""\n\nimport a\n\n# why\nx = (\n1,\n)  # end\n\ndef f():\n    """Doc."""\n    return x\n'
    assert code_lines(text) == 5
