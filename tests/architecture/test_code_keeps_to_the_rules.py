"""What no source of a package does: unpickle, check with assert, print; and what nobody does: fork."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator

import pytest
import sources
import workspace
from sources import Source

UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
LOADERS = {"torch.load", "torch.jit.load", "torch.package.PackageImporter", "numpy.memmap.load", "pandas.read_pickle"}
STARTS = {"subprocess.run", "subprocess.Popen", "subprocess.check_call", "subprocess.check_output"}
FORKING = {"preexec_fn", "user", "group", "extra_groups"}
"""With any of these `subprocess` forks: a copy of a process with gRPC's threads may abort before it is the program."""
FORKS = {"os.fork", "os.forkpty", "pty.fork", "pty.spawn", "multiprocessing.Pool", "multiprocessing.Process"}
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


def forks(source: Source) -> Iterator[str]:
    """Every call in a file that copies this process, as `path:line call`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call):
            name = sources.dotted(node.func)
            if name in FORKS or (name in STARTS and FORKING & {str(word.arg) for word in node.keywords}):
                yield f"{source.path}:{node.lineno} {name}"


def test_nothing_copies_a_process_that_may_be_calling_grpc() -> None:
    everything = (*sources.of_packages(), *sources.of_tests(), *sources.of_scripts())
    assert not [found for source in everything for found in forks(source)]
    planted = "subprocess.run(c, user='postgres')\nsubprocess.run(c, start_new_session=True)\npid = os.fork()"
    assert list(forks(Source("planted.py", planted))) == ["planted.py:1 subprocess.run", "planted.py:3 os.fork"]


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


CLEAN_UPS = {
    "stop", "close", "kill", "terminate", "shutdown", "unlink", "rename", "rmtree", "delete", "abandon", "dispose",
    "destroy_process_group",
}  # fmt: skip
QUIET = {"cleaning_up", "suppress", "contextlib.suppress"}
"""What keeps the error of cleaning up from replacing the one that led there."""
HARMLESS = {"asyncio.wait", "asyncio.gather"}


def is_quiet(node: ast.stmt) -> bool:
    """Whether a statement is a `with` in which errors are logged or ignored."""
    items = node.items if isinstance(node, ast.With | ast.AsyncWith) else []
    return any(
        isinstance(one.context_expr, ast.Call) and sources.dotted(one.context_expr.func) in QUIET for one in items
    )


def loud(body: list[ast.stmt], *, everything: bool) -> Iterator[ast.AST]:
    """What may raise in a body that cleans up: what is awaited, and with `everything` calls by names of `CLEAN_UPS`."""
    for node in body:
        for part in () if is_quiet(node) else ast.iter_child_nodes(node):
            if isinstance(part, ast.stmt):
                yield from loud([part], everything=everything)
            else:
                yield from (one for one in ast.walk(part) if is_loud(one, everything=everything))


def is_loud(node: ast.AST, *, everything: bool) -> bool:
    if isinstance(node, ast.Await) and isinstance(node.value, ast.Call):
        name = sources.dotted(node.value.func) or ""
        return name not in HARMLESS and not name.endswith(".wait")
    return everything and isinstance(node, ast.Call) and (sources.dotted(node.func) or "").split(".")[-1] in CLEAN_UPS


def replacements(source: Source) -> Iterator[str]:
    """Every place of a file where an error in cleaning up replaces the one that led there, as `path:line`."""
    for node in ast.walk(source.tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.ExceptHandler):
            raised = any(isinstance(one, ast.Raise) and one.exc is None for one in node.body)
            found = list(loud(node.body, everything=True)) if raised else []
        elif isinstance(node, ast.Try):
            found = list(loud(node.finalbody, everything=False))
        yield from (f"{source.path}:{one.lineno}" for one in found if isinstance(one, ast.expr))


def test_an_error_in_cleaning_up_does_not_replace_the_one_that_led_there() -> None:
    assert not [found for source in sources.of_packages() for found in replacements(source)]
    planted = "try:\n    x()\nexcept OSError:\n    if y:\n        y.stop()\n    raise\nfinally:\n    await z()"
    assert list(replacements(Source("planted.py", f"async def f():\n{textwrap.indent(planted, '    ')}"))) == [
        "planted.py:9",
        "planted.py:6",
    ]
