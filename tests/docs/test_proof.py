"""Each mechanism is proven, and docs/proof.md says what the tests recorded."""

from __future__ import annotations

from pathlib import Path

import proof_page
import proof_records
import pytest
from attn_testing.laws import MECHANISM_LAWS
from proof_records import Proof

AGAIN = "run `nox -s proof`, with the folders of the tests after -- if they are few"
INDEPENDENT = {"package", "paper"}
"""What reads nothing of a mechanism but its weights."""
LAWS = {law.title() for law in MECHANISM_LAWS}
REPORT = """<testsuites><testsuite>
<testcase classname="packages.a.tests.test_b" name="test_c[1]"><properties>
<property name="agrees" value='{"mechanism": "m", "kind": "paper", "oracle": "o", "part": "outputs", "error": 1.26e-9,
 "dtype": "float64"}'/></properties></testcase>
<testcase classname="packages.a.tests.test_b" name="test_c[2]"><properties>
<property name="agrees" value='{"mechanism": "m", "kind": "paper", "oracle": "o", "part": "outputs", "error": 3e-8,
 "dtype": "float64"}'/></properties></testcase>
<testcase classname="packages.a.tests.test_b.TestM" name="test_law[x]"><properties>
<property name="law" value='{"mechanism": "m", "law": "cost"}'/></properties></testcase>
<testcase classname="packages.a.tests.test_b.TestM" name="test_weights_are_shares_of_the_allowed_keys[none]">
<skipped message="it has none"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def proof() -> Proof:
    return proof_records.load()


def test_the_page_is_what_the_tests_recorded(proof: Proof) -> None:
    assert proof_page.PAGE.read_text("utf-8") == proof_page.page(proof), "run python tools/proof.py"


def test_every_mechanism_was_compared_with_something_independent(proof: Proof) -> None:
    compared = {found.mechanism for found in proof.comparisons if found.kind in INDEPENDENT}
    assert not set(proof_page.local_mechanisms()) - compared, AGAIN


def test_gradients_of_every_mechanism_were_compared_with_something_independent(proof: Proof) -> None:
    compared = {
        found.mechanism for found in proof.comparisons if found.kind in INDEPENDENT and found.gradients is not None
    }
    assert not set(proof_page.local_mechanisms()) - compared, AGAIN


def test_every_law_was_kept_by_every_mechanism_or_says_why_it_is_silent(proof: Proof) -> None:
    for name in proof_page.local_mechanisms():
        passed, silent = proof_page.laws_of(name, proof.laws)
        assert {*passed, *silent} == LAWS, f"{name}: {AGAIN}"
        assert all(silent.values()), name


def test_every_test_that_compares_is_recorded_and_every_record_has_its_test(proof: Proof) -> None:
    recorded = {found.test for found in proof.comparisons}
    there = {test for test in proof_records.recording_tests() if "test_agreement.py" not in test}
    assert recorded == there, AGAIN


def test_a_report_gives_the_largest_error_of_all_cases_and_the_laws_by_class(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT, "utf-8")
    found = proof_records.read(path)
    (comparison,), (laws,) = found.comparisons, found.laws
    assert (comparison.test, comparison.outputs) == ("packages/a/tests/test_b.py::test_c", 3e-8)
    assert comparison.gradients is None
    assert (laws.test, laws.passed, laws.silent) == (
        "packages/a/tests/test_b.py::TestM",
        ["cost"],
        {"row_sums": "it has none"},
    )


def test_a_report_with_a_failure_is_not_recorded(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT.replace("<skipped", "<failure"), "utf-8")
    with pytest.raises(SystemExit, match=r"test_b\.py::TestM::test_weights_are_shares_of_the_allowed_keys failed"):
        proof_records.read(path)


def test_a_new_run_replaces_the_records_of_its_tests_and_drops_those_of_tests_that_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    there = next(iter(proof_records.recording_tests()))
    folder, _, name = there.partition("::")
    place = folder.removesuffix(".py").replace("/", ".")
    renamed = REPORT.replace("packages.a.tests.test_b", place).replace("test_c", name.rpartition("::")[2])
    path.write_text(renamed, "utf-8")
    old = proof_records.read(path)
    path.write_text(renamed.replace("3e-8", "5e-8"), "utf-8")
    (entry,) = proof_records.merged(old, proof_records.read(path)).comparisons
    assert entry.outputs == 5e-8
    nothing = Proof(comparisons=[], laws=[])
    path.write_text(REPORT, "utf-8")
    assert proof_records.merged(proof_records.read(path), nothing) == nothing
