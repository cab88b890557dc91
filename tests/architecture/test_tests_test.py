"""Every test can fail: it asserts, expects an error, or calls something that does."""

from __future__ import annotations

import ast
from collections.abc import Iterable

import pytest
import sources
import workspace
from hypothesis import settings
from sources import Source

# What fails a test when it is called, of pytest, torch and numpy.
DEMANDING = {"raises", "warns", "fail", "deprecated_call", "assert_close", "assert_allclose", "assert_array_equal"}
# The same of `attn_testing.Agreement`.
DEMANDING |= {"outputs", "gradients", "functions"}
# A wait of asyncio that ends is what such a test promises.
DEMANDING |= {"wait_for"}
# What these promise is that nothing is raised.
FAIL_BY_RAISING = {
    "test_a_mutated_safetensors_file_is_read_or_refused_and_nothing_else",
    "test_the_port_is_free_again_after_the_server",
}


def calls(node: ast.AST) -> set[str]:
    """The last words of everything that is called somewhere in a node: `c` of `a.b.c()`."""
    called = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
    # What is called may be an attribute of anything, such as of another call's result, which has no dotted name.
    return {f.attr if isinstance(f, ast.Attribute) else sources.dotted(f).rpartition(".")[2] for f in called}


def demands(function: ast.AST, demanding: set[str]) -> bool:
    """Whether a function can fail by its own word, or by calling one that can."""
    own = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(function))
    return own or bool(calls(function) & demanding)


def demanding_helpers(files: Iterable[Source]) -> set[str]:
    """The names of the helpers, in these files, that can fail; those that call such helpers too."""
    helpers = [function for source in files for _, function in source.functions() if not is_test(function.name)]
    found = set(DEMANDING)
    while more := {helper.name for helper in helpers if helper.name not in found and demands(helper, found)}:
        found |= more
    return found


def is_test(name: str) -> bool:
    """Whether pytest collects a function of this qualified name: what lies inside a function it does not."""
    *owners, last = name.split(".")
    return last.startswith("test_") and all(owner[0].isupper() for owner in owners)


def idle(files: Iterable[Source], demanding: set[str]) -> list[str]:
    """The tests that cannot fail, as `path:name`."""
    return [
        f"{source.path}:{name}"
        for source in files
        for name, function in source.functions()
        if is_test(name) and not demands(function, demanding)
    ]


@pytest.mark.parametrize("name", workspace.packages())
def test_every_test_of_a_package_can_fail(name: str) -> None:
    files = sources.below(workspace.packages()[name].tests)
    kit = sources.below(workspace.packages()["attn-testing"].source)
    found = idle(files, demanding_helpers([*files, *kit]))
    assert not [name for name in found if name.rpartition(":")[2] not in FAIL_BY_RAISING]


def test_every_test_of_the_whole_and_every_law_of_the_kit_can_fail() -> None:
    kit = sources.below(workspace.packages()["attn-testing"].source)
    files = [*sources.below(workspace.ROOT / "tests"), *kit]
    assert not idle(files, demanding_helpers(files))


def test_what_fails_by_raising_is_still_there() -> None:
    names = {name for source in sources.of_tests() for name, _ in source.functions()}
    assert names >= FAIL_BY_RAISING


@pytest.mark.parametrize(
    "text",
    [
        "def test_nothing():\n    compute()",
        "class TestIt:\n    def test_nothing(self):\n        x = 1 == 2",
        "async def test_nothing():\n    await helper()\ndef helper():\n    return 1",
    ],
)
def test_a_test_that_cannot_fail_is_found(text: str) -> None:
    files = [Source("planted.py", text)]
    assert len(idle(files, demanding_helpers(files))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def test_it():\n    assert compute()",
        "def test_it():\n    with pytest.raises(ValueError):\n        compute()",
        "def test_it():\n    outer()\ndef outer():\n    inner()\ndef inner():\n    assert 1",
        "def test_it():\n    torch.testing.assert_close(a, b)",
        "def test_it(agrees):\n    agrees('mha', paper='its equations').outputs(a, b, 0.0)",
    ],
)
def test_a_test_that_can_fail_is_left_alone(text: str) -> None:
    files = [Source("planted.py", text)]
    assert not idle(files, demanding_helpers(files))


def test_examples_of_hypothesis_may_take_as_long_as_a_busy_machine_needs() -> None:
    assert settings().deadline is None
