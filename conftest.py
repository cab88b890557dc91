"""pytest configuration of all tests: independence from the shell, and options that select, order and measure the tests.

`--quick SECONDS` runs some tests of every package, as many as fit into that time; `--bitwise` runs only the tests that
compare results bitwise; `--record-durations` and `--longest-first` belong to `tools/durations.py`.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import logging
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import cases
import durations
import pytest
from hypothesis import settings

# Examples have no deadline: on a busy machine any of them may take longer than hypothesis's 200 ms.
settings.register_profile("attn", parent=settings(), deadline=None)
settings.load_profile("attn")

# Background processes of a shell without job control ignore SIGINT, and so would the programs that tests start in order
# to interrupt them. The default handler is restored.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS_PER_FILE, SECONDS_PER_FILE = 20, 0.5
"""The limits of a quick run for each file: the number of tests, evenly spread, and the processor time."""


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled_is_kept() -> Iterator[None]:
    """Drop what torch.compile captured in a module's tests: nothing else does before the process ends."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(autouse=True)
def _process_as_found(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves process-wide state changed, which would make results depend on the order of tests, and
    one that uses Ray without a mark that says so."""
    found = process_state()
    yield
    left = process_state()
    changed = {name: f"was {was}, is {left[name]}" for name, was in found.items() if left[name] != was}
    if changed:
        pytest.fail(f"the test leaves the process changed: {changed}")
    ray = sys.modules.get("ray")
    marked = any(request.node.get_closest_marker(name) for name in ("ray", "cluster"))
    if not marked and ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        pytest.fail("the test uses Ray: mark it ray, and cluster, too, if another one of the usual run does the same")


@pytest.fixture(scope="session")
def some(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Gives every nth of many alike cases, from the one at `shift` on; all of them with `--every-case`."""

    def chosen(values: Iterable[Any], n: int, shift: int = 0) -> list[Any]:
        found = list(values)
        return found if request.config.getoption("--every-case") else found[shift % n :: n]

    return chosen


def process_state() -> dict[str, object]:
    """The process-wide state that a test could change; torch's part only if torch has been imported."""
    state: dict[str, object] = {
        "working directory": Path.cwd(),
        "log handlers": list(logging.getLogger().handlers),
        "structlog configured": "structlog" in sys.modules and sys.modules["structlog"].is_configured(),
    }
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        state |= {
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    return state


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this repository's runs."""
    group = parser.getgroup("attn")
    group.addoption("--quick", type=float, metavar="SECONDS", help="run what fits into SECONDS, of every package")
    group.addoption("--every-case", action="store_true", help="run every case of every law of mechanisms")
    group.addoption("--longest-first", action="store_true", help="order the files by .ci/durations.json")
    group.addoption("--record-durations", type=Path, metavar="FILE", help="write the processor time of each file")
    group.addoption("--bitwise", action="store_true", help="run only tests that compare with torch.equal")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugins of the mark `sweep` and of `--quick`, `--record-durations` and `--longest-first`."""
    config.pluginmanager.register(Sweeps(), "sweeps")
    if (seconds := config.getoption("--quick")) is not None:
        config.pluginmanager.register(QuickRun(seconds), "quick-run")
    if (target := config.getoption("--record-durations")) is not None:
        config.pluginmanager.register(durations.Recorder(target), "recorded-durations")
    if config.getoption("--longest-first"):
        config.pluginmanager.register(durations.LongestFirst(), "longest-first")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--bitwise`, keep only the tests that compare results bitwise."""
    if config.getoption("--bitwise"):
        kept = [item for item in items if compares_bits(item)]
        config.hook.pytest_deselected(items=[item for item in items if not compares_bits(item)])
        items[:] = kept


def pytest_collection_finish() -> None:
    """Leave what was collected, objects by the million, out of every later search for garbage."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free at its end what was left out."""
    gc.unfreeze()


class Sweeps:
    """Plugin that marks the cases of a `sweep` nightly but for one of each kind, which it has by day."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark them before they are selected by their marks."""
        sweeps: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            if item.get_closest_marker("sweep"):
                sweeps[item.nodeid.partition("[")[0]].append(item)
        for test, sweep in sweeps.items():
            (of,) = sweep[0].get_closest_marker("sweep").args  # type: ignore[union-attr]
            chosen = cases.by_day(sweep, test, of)
            for case in sweep:
                if case not in chosen:
                    case.add_marker("nightly")


class QuickRun:
    """Plugin that runs one file of each package in turn, each within `SECONDS_PER_FILE`, until the time is used up.

    Tests marked slow are left out. Every worker of pytest-xdist has the same order and stops by its own clock; use
    `--dist loadfile` and `--no-loadscope-reorder`, so that each file stays with one worker and files start in order.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = 0.0
        self.spent: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Order the tests: the first files of all packages, then their second files, and so on."""
        packages: defaultdict[str, dict[str, list[pytest.Item]]] = defaultdict(dict)
        for item in items:
            if not item.get_closest_marker("slow"):
                file = item.nodeid.partition("::")[0]
                package = "/".join(file.split("/")[:2])
                packages[package].setdefault(file, []).append(item)
        rounds = itertools.zip_longest(*(files.values() for files in packages.values()), fillvalue=[])
        kept = [item for files in rounds for file in files for item in file[:: -(-len(file) // TESTS_PER_FILE) or 1]]
        left = set(items) - set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Add the processor time of a test and its fixtures to that of its file."""
        self.began = self.began or time.monotonic()
        start = durations.processor_time()
        try:
            return (yield)
        finally:
            self.spent[item.nodeid.partition("::")[0]] += durations.processor_time() - start

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip the test if the total time or the time of its file is used up."""
        over = time.monotonic() - self.began > self.seconds
        if over or self.spent[item.nodeid.partition("::")[0]] > SECONDS_PER_FILE:
            pytest.skip("left to the full run")


def compares_bits(item: pytest.Item) -> bool:
    """Whether the test function itself uses the name `equal` or `array_equal` (of torch or numpy)."""
    code = getattr(inspect.unwrap(getattr(item, "function", lambda: None)), "__code__", None)
    return code is not None and bool({"equal", "array_equal"} & set(names(code)))


def names(code: CodeType) -> Iterator[str]:
    """The global and attribute names that a function and its nested functions use."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names(inner)
