"""No law can be dropped, replaced or skipped without an xfail that has a reason."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from attn_core import Causal, Window
from attn_core.masks.base import Both, Either
from broken.sound import Sound

from attn_testing import MechanismLaws, MechanismSuite, laws
from attn_testing.law import Law
from attn_testing.laws.numerics import masks_of
from attn_testing.suites import MechanismLaws as Laws
from attn_testing.suites import tampering, untested


def run_pytest(folder, body):
    source = "import pytest\nfrom attn_testing import MechanismLaws, MechanismSuite, laws\n"
    source += "from broken.sound import Sound\nfrom broken import BROKEN\n"
    (folder / "test_it.py").write_text(source + textwrap.dedent(body))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir",
        folder,
    ]
    return subprocess.run(
        [*map(str, command), "test_it.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},  # for `broken`
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_class_of_all_laws_inherits_every_one():
    assert all(issubclass(Laws, law) for law in laws.MECHANISM_LAWS)


def test_no_two_laws_use_one_test_name():
    names = [name for law in laws.MECHANISM_LAWS for name in law.checks()]
    assert len(names) == len(set(names))


def test_every_law_says_in_one_sentence_what_it_demands():
    assert all(law.__doc__ and law.checks() for law in laws.MECHANISM_LAWS)


def test_an_untouched_class_is_not_tampered_with():
    class Untouched(MechanismLaws):
        mechanism = Sound()

    assert tampering(Untouched) == []


def test_a_law_set_to_none_is_found():
    class Dropped(MechanismLaws):
        mechanism = Sound()
        test_chunks_equal_one_prefill = None

    assert "chunked_prefill" in " ".join(tampering(Dropped))


def test_a_law_replaced_by_another_test_is_found():
    class Replaced(MechanismLaws):
        mechanism = Sound()

        def test_chunks_equal_one_prefill(self, case):
            pass

    assert "chunked_prefill" in " ".join(tampering(Replaced))


def test_a_replacement_marked_skip_is_found():
    class Skipped(MechanismLaws):
        mechanism = Sound()

        @pytest.mark.skip(reason="later")
        def test_chunks_equal_one_prefill(self, case):
            pass

    assert "chunked_prefill" in " ".join(tampering(Skipped))


def test_an_xfail_without_a_reason_is_found_and_one_with_a_reason_is_not():
    class Silent(MechanismLaws):
        mechanism = Sound()
        test_chunks_equal_one_prefill = pytest.mark.xfail(lambda self, case: None)

    class Open(MechanismLaws):
        mechanism = Sound()

        @pytest.mark.xfail(reason="chunks are not implemented")
        def test_chunks_equal_one_prefill(self, case):
            super().test_chunks_equal_one_prefill(case)

    assert "chunked_prefill" in " ".join(tampering(Silent))
    assert tampering(Open) == []


def test_a_class_marked_skip_is_found():
    @pytest.mark.skip(reason="never")
    class Marked(MechanismLaws):
        mechanism = Sound()

    assert tampering(Marked) == ["the class is marked skip"]


def test_a_law_deleted_from_the_bases_is_found():
    class Few(MechanismSuite, laws.RowSums):
        mechanism = Sound()
        laws = laws.MECHANISM_LAWS

    assert "chunked_prefill is not inherited" in tampering(Few)


@pytest.mark.parametrize("name", ["test_no_law_is_dropped_or_replaced", "pytest_generate_tests", "subject"])
def test_the_guard_itself_cannot_be_replaced(name):
    with pytest.raises(TypeError, match=name):
        type("Unguarded", (MechanismLaws,), {"mechanism": Sound(), name: None})


def test_single_laws_can_be_taken_one_by_one(tmp_path):
    done = run_pytest(
        tmp_path,
        """
        class TestOne(MechanismSuite, laws.RowSums):
            mechanism = Sound()
        """,
    )
    assert done.returncode == 0, done.stdout
    assert "test_weights_are_shares_of_the_allowed_keys[causal-width16-heads4]" in done.stdout
    assert "test_chunks" not in done.stdout


def test_pytest_fails_a_broken_mechanism_and_a_tampered_class_and_says_why_it_skips(tmp_path):
    done = run_pytest(
        tmp_path,
        """
        class TestBroken(MechanismSuite, laws.ChunkedPrefill):
            mechanism = BROKEN[laws.ChunkedPrefill]

        class TestTampered(MechanismSuite, laws.ChunkedPrefill):
            mechanism = BROKEN[laws.ChunkedPrefill]
            test_chunks_equal_one_prefill = None

        class TestSilent(MechanismSuite, laws.RowSums):
            mechanism = BROKEN[laws.PaddingInvariance]
        """,
    )
    assert done.returncode == 1, done.stdout
    assert "FAILED test_it.py::TestBroken::test_chunks_equal_one_prefill[causal-width16-heads4]" in done.stdout
    assert "outputs of a prompt in chunks of (1, 4, 2, 5) and at once differ" in done.stdout
    assert "FAILED test_it.py::TestTampered::test_no_law_is_dropped_or_replaced" in done.stdout
    assert "sound does not declare WEIGHTS and NORMALISED" in done.stdout


def test_a_slow_law_leaves_out_only_cases_of_which_every_part_was_tested(pytestconfig):
    class Slow(Law):
        @classmethod
        def parts(cls, case):
            return frozenset(case) if case else None

    assert untested(pytestconfig, Slow, ["ab", "ba", "", "bc"]) == ["ab", "", "bc"]
    assert untested(pytestconfig, Slow, ["c", "", "ad"]) == ["", "ad"]


def test_the_masks_within_a_mask_are_parts_too():
    mask = Causal() & (Window(left=1) | ~Window(left=3))
    assert {Both, Either, Causal, Window} < set(masks_of(mask))
