"""What no source of a package does: unpickle, check with assert, print, hide a second owner of a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import sources
import workspace
from sources import Source

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
LOADERS = {"torch.load", "torch.jit.load", "torch.package.PackageImporter", "numpy.memmap.load", "pandas.read_pickle"}
ALLOW_PICKLE = {"numpy.load", "np.load", "numpy.save", "np.save"}


def offences(source: Source) -> Iterator[str]:
    """Every breach in a file, as `path:line what`."""
    for line, module in source.imports():
        if UNPICKLERS & set(module.split(".")):
            yield f"{source.path}:{line} imports {module}: a file or a message must never be able to run code"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assert):
            yield f"{source.path}:{node.lineno} assert: python -O removes it; raise an error of attn_core.errors"
        elif isinstance(node, ast.Call):
            yield from (f"{source.path}:{node.lineno} {what}" for what in call_offences(node))
        elif isinstance(node, ast.ImportFrom) and any(f"{node.module}.{a.name}" in LOADERS for a in node.names):
            yield f"{source.path}:{node.lineno} imports a loader that unpickles"


def call_offences(call: ast.Call) -> Iterator[str]:
    """What is wrong with one call."""
    name = sources.dotted(call.func)
    if name in LOADERS:
        yield f"{name}: unpickles; use safetensors"
    allowed = [word for word in call.keywords if word.arg == "allow_pickle" and getattr(word.value, "value", True)]
    if name in ALLOW_PICKLE and allowed:
        yield f"{name} with allow_pickle"
    if name == "print" and not any(word.arg == "file" for word in call.keywords):
        yield "print: a library answers its caller; only the command line prints"


def may_print(source: Source) -> bool:
    """Whether a file belongs to the command line."""
    return "/attn_cli/" in source.path


@pytest.mark.parametrize("name", workspace.packages())
def test_a_package_neither_unpickles_nor_asserts_nor_prints(name: str) -> None:
    files = sources.below(workspace.packages()[name].source)
    found = [f for source in files for f in offences(source) if not (may_print(source) and " print:" in f)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "def f():\n    from ray.cloudpickle import loads",
        "import multiprocessing.shelve as s",
        "import torch\nx = torch.load(p, weights_only=True)",
        "from torch import load",
        "import numpy as np\nx = np.load(p, allow_pickle=flag)",
        "assert x, 'no'",
        "print(1)",
    ],
)
def test_a_planted_breach_is_found(text: str) -> None:
    assert len(list(offences(Source("planted.py", text)))) == 1


def test_what_only_looks_like_a_breach_is_not_one() -> None:
    text = "if TYPE_CHECKING:\n    import pickle\nx = np.load(p, allow_pickle=False)\nprint(1, file=stream)"
    assert not list(offences(Source("planted.py", text)))
