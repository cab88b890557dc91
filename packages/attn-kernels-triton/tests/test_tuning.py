from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("triton")

import torch
from attn_core import AttentionInputs, AttentionSpec, Causal, Full, Heads, Window
from attn_kernels_triton.attention import backward, forward, tiles
from attn_kernels_triton.attention.plan import plan_of
from attn_kernels_triton.paged import attend as paged
from attn_kernels_triton.paged.tiles import PAGED_CHOICES
from attn_kernels_triton.recurrence import launch as recurrence
from attn_kernels_triton.recurrence.launch import Given
from attn_kernels_triton.recurrence.tiles import ScanSizes, scan_choice
from attn_kernels_triton.tuning import store
from attn_kernels_triton.tuning.__main__ import main
from attn_kernels_triton.tuning.candidates import BACKWARD, CANDIDATES, PAGED, RECURRENCES, every, kind_of
from attn_kernels_triton.tuning.measure import Measured, best
from attn_kernels_triton.tuning.trials import count

DEVICE = "NVIDIA H200"
CPU = torch.device("cpu")
KIND = "128 causal long"
CHOICE = CANDIDATES[128][1]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder for what is measured."""
    monkeypatch.setenv(store.FOLDER, str(tmp_path))
    store.measured.cache_clear()
    yield tmp_path
    store.measured.cache_clear()


def plan(mask, length: int = 64):
    heads = Heads(query=1, key_value=1, key_size=128, value_size=128)
    rows = torch.zeros(1, 1, 1, 128, dtype=torch.bfloat16).expand(1, length, 1, 128)
    return plan_of(AttentionSpec(heads=heads, mask=mask), AttentionInputs(query=rows, key=rows, value=rows))


def test_what_is_shipped_is_the_first_candidate():
    assert {width: choices[0] for width, choices in CANDIDATES.items()} == tiles.DENSE_CHOICES


def test_what_is_shipped_is_the_first_candidate_of_backward_passes_decoding_and_recurrences():
    assert {width: choices[0] for width, choices in BACKWARD.items()} == tiles.DENSE_BACKWARD
    assert all(choices[0] == PAGED_CHOICES[16, True, width] for width, choices in PAGED.items())
    for (program, channels), choices in RECURRENCES.items():
        assert choices[0] == scan_choice(program, ScanSizes(torch.bfloat16, 128, 128, 4096, channels))


def test_every_kind_has_two_to_four_candidates_all_of_them_different():
    for name, candidates in every().items():
        assert 2 <= len(candidates) <= 4, name
        assert len(set(candidates)) == len(candidates), name


@pytest.mark.parametrize("name", ["backward 128 causal long", "decode 128", "recall heads"])
def test_what_was_measured_of_other_programs_is_kept_as_it_was(name):
    candidate = every()[name][-1]
    store.add(DEVICE, {name: candidate})
    assert store.read(DEVICE) == {name: candidate}


def test_gradients_take_what_was_measured(monkeypatch):
    monkeypatch.setattr(store, "name_of", lambda device: DEVICE)
    long = plan(Causal(), 5000)
    assert backward.chosen_backward(long, CPU) == tiles.DENSE_BACKWARD_BOUNDED[128] != BACKWARD[128][0]
    store.add(DEVICE, {"backward 128 causal long": BACKWARD[128][0]})
    store.measured.cache_clear()
    assert backward.chosen_backward(long, CPU) == BACKWARD[128][0]


def test_paired_programs_are_taken_for_whole_tiles_where_they_run(monkeypatch):
    paired = tiles.PAIRED_CHOICES[128]
    assert forward.chosen(plan(Causal(), 1024), CPU) == tiles.DENSE_CHOICES[128]
    monkeypatch.setattr(forward, "pairs", lambda device: True)
    assert forward.chosen(plan(Causal(), 1024), CPU) == forward.chosen(plan(Full(), 1024), CPU) == paired
    for other in (plan(Causal(), 1000), plan(Window(left=100), 1024)):
        assert forward.chosen(other, CPU) == tiles.DENSE_CHOICES[128]


def test_programs_of_keys_are_others_where_masks_leave_pairs_out():
    full, causal = (backward.chosen_backward(plan(mask, 5000), CPU) for mask in (Full(), Causal()))
    assert (full, causal) == (tiles.DENSE_BACKWARD[128], tiles.DENSE_BACKWARD_BOUNDED[128])
    assert full != causal


def test_decoding_takes_what_was_measured_for_rows_as_they_are(monkeypatch):
    monkeypatch.setattr(store, "name_of", lambda device: DEVICE)
    query = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    assert paged.measured_paged(query, "plain", (128, 128)) is None
    store.add(DEVICE, {"decode 128": PAGED[128][1]})
    store.measured.cache_clear()
    assert paged.measured_paged(query, "plain", (128, 128)) == PAGED[128][1]
    assert paged.measured_paged(query, "int8", (128, 128)) is None
    assert paged.measured_paged(query.float(), "plain", (128, 128)) is None


def test_recurrences_take_what_was_measured_for_two_byte_numbers(monkeypatch):
    monkeypatch.setattr(store, "name_of", lambda device: DEVICE)
    rows = torch.zeros(1, 64, 1, 128, dtype=torch.bfloat16)
    given = Given(rows, rows, rows, torch.zeros(1, 64, 1, 1), None, None)
    shipped = recurrence.chosen_scan("recall", given)
    store.add(DEVICE, {"recall heads": RECURRENCES["recall", False][1]})
    store.measured.cache_clear()
    assert shipped == RECURRENCES["recall", False][0]
    assert recurrence.chosen_scan("recall", given) == RECURRENCES["recall", False][1]
    wide = Given(*(part if part is None else part.float() for part in given))
    assert recurrence.chosen_scan("recall", wide) == scan_choice("recall", wide.sizes)


def test_what_was_measured_is_kept_and_added_to():
    assert store.read(DEVICE) == {}
    store.add(DEVICE, {KIND: CHOICE})
    store.add(DEVICE, {"64 full short": CANDIDATES[64][1]})
    assert store.read(DEVICE) == {KIND: CHOICE, "64 full short": CANDIDATES[64][1]}
    assert store.read("another device") == {}


def test_what_was_measured_is_taken_in_place_of_what_is_shipped(monkeypatch):
    monkeypatch.setattr(store, "name_of", lambda device: DEVICE)
    asked = plan(Causal(), 5000)
    assert kind_of(asked.sizes, asked.rule).name == KIND
    assert forward.chosen(asked, torch.device("cpu")) == CANDIDATES[128][0]
    store.add(DEVICE, {KIND: CHOICE})
    store.measured.cache_clear()
    assert forward.chosen(asked, torch.device("cpu")) == CHOICE
    assert forward.chosen(plan(Full(), 5000), torch.device("cpu")) == CANDIDATES[128][0]


def test_kinds_tell_what_bounds_a_band_and_how_many_keys_there_are():
    kinds = [kind_of(one.sizes, one.rule) for one in (plan(Full()), plan(Window(left=9)), plan(Causal(), 4096))]
    assert [kind.name for kind in kinds] == ["128 full short", "128 window short", KIND]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"origin": {}}',
        json.dumps({"origin": {"device": "another"}, "choices": {}}),
        "\x00" * 20,
    ],
)
def test_a_file_that_is_not_ours_is_passed_by_with_a_warning_and_written_anew(content):
    path = store.add(DEVICE, {KIND: CHOICE})
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert store.read(DEVICE) == {}
    with pytest.warns(RuntimeWarning, match="ignoring"):
        store.add(DEVICE, {KIND: CHOICE})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.read(DEVICE) == {KIND: CHOICE}


@pytest.mark.parametrize("choice", [[128, 128, 4, 9, "descriptors"], [1], ["x"] * 5, 7])
def test_a_choice_that_is_no_candidate_is_passed_by(choice):
    path = store.add(DEVICE, {})
    path.write_text(json.dumps({"origin": store.origin(DEVICE), "choices": {KIND: choice}}))
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert store.read(DEVICE) == {}


def test_processes_that_add_at_once_lose_nothing_of_one_another(folder):
    code = "import sys; from attn_kernels_triton.tuning import store"
    code += "; from attn_kernels_triton.tuning.candidates import CANDIDATES"
    code += f"; store.add({DEVICE!r}, {{sys.argv[1]: CANDIDATES[int(sys.argv[1].split()[0])][-1]}})"
    names = ["64 full long", "128 causal short"]
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in names]
    assert [process.wait(timeout=250) for process in running] == [0] * len(names)
    assert sorted(store.read(DEVICE)) == sorted(names)
    assert not list(folder.glob("*.part"))


def test_the_fastest_of_each_kind_is_kept():
    kind = kind_of(plan(Causal()).sizes, plan(Causal()).rule)
    found = [
        Measured(kind.name, choice, seconds)
        for choice, seconds in zip(CANDIDATES[128], (3.0, 2.0, 4.0, 5.0), strict=False)
    ]
    assert best(found) == {kind.name: CANDIDATES[128][1]}


def test_a_run_says_what_it_will_measure_and_how_long_then_what_it_found_and_where_it_is(capsys, monkeypatch, folder):
    found = [
        Measured("backward 128 full long", candidate, seconds)
        for candidate, seconds in zip(BACKWARD[128], (3e-3, 1e-3), strict=False)
    ]
    for name, value in {
        "absence": lambda: None,
        "has_copier": lambda device: True,
        "name_of": lambda device: DEVICE,
        "measure": lambda device: iter([Measured(KIND, CHOICE, 2e-3), *found]),
    }.items():
        monkeypatch.setattr(f"attn_kernels_triton.tuning.__main__.{name}", value)
    assert main() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{count()} candidates")
    assert "minutes" in said[1]
    assert [line.split()[-2:] for line in said[2:5]] == [["2.000", "ms"], ["3.000", "ms"], ["1.000", "ms"]]
    assert said[-1].endswith(".json")
    assert store.read(DEVICE) == {KIND: CHOICE, "backward 128 full long": BACKWARD[128][1]}


def test_without_a_gpu_there_is_nothing_to_tune(capsys, monkeypatch):
    monkeypatch.setattr("attn_kernels_triton.tuning.__main__.absence", lambda: "this machine has no GPU")
    assert main() == 1
    assert "no GPU" in capsys.readouterr().err
