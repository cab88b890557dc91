"""A usual run leaves out cases of laws, but no pair of a law, a setting and a mechanism, and no part that compiles."""

import importlib.util
from inspect import signature
from pathlib import Path

import pytest
from attn_testing import MechanismLaws, laws
from attn_testing.subject import SETTINGS


@pytest.fixture(scope="module")
def suites():
    """The classes of this package's tests that inherit all laws of mechanisms."""
    found = {}
    for path in sorted(Path(__file__).parent.rglob("test_*conformance.py")):
        spec = importlib.util.spec_from_file_location("_".join(path.parts[-2:]), path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, suite in vars(module).items():
            if isinstance(suite, type) and issubclass(suite, MechanismLaws) and suite is not MechanismLaws:
                found[f"{path.parent.name} {name}"] = suite
    return found


def pairs(suites, law, *, usual):
    """Each class with the modes and settings in which a law applies, or in which a usual run tests it."""
    found = set()
    for name, suite in suites.items():
        if usual:
            cases = suite.chosen(law, every=False)[0]
        else:
            cases = [case for case in suite.subject().cases if law.excuse(case) is None]
        for case in cases:
            if case.refusal is None:
                mode, _, setting = case.label.partition("-")
                found |= {(name, mode), (name, setting.removesuffix("-sketch"))}
    return found


def test_no_pair_of_a_law_a_setting_and_a_mechanism_is_left_out(suites):
    everywhere, usually = set(), set()
    for law in laws.MECHANISM_LAWS:
        if any("case" in signature(getattr(law, test)).parameters for test in law.checks()):
            wanted, tested = pairs(suites, law, usual=False), pairs(suites, law, usual=True)
            assert {name for name, _ in wanted} == {name for name, _ in tested}, law.title()
            common = {setting for name, setting in wanted if suites[name].settings is SETTINGS}
            missed = common - {setting for _, setting in tested}
            assert not missed, f"{law.title()} runs for no mechanism in {sorted(missed)}"
            everywhere, usually = everywhere | wanted, usually | tested
    assert everywhere == usually


def test_every_layer_class_and_every_part_of_a_spec_is_compiled(suites):
    wanted, compiled = set(), set()
    for suite in suites.values():
        wanted = wanted.union(*map(laws.Compiles.parts, suite.subject().cases))
        compiled = compiled.union(*map(laws.Compiles.parts, suite.chosen(laws.Compiles, every=False)[0]))
    assert wanted == compiled
