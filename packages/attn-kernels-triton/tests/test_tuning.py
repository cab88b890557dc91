from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest

pytest.importorskip("triton")

import torch
from attn_core import AttentionSpec, Causal, Full, Heads, Operands, Window
from attn_kernels_triton.attention import tiles
from attn_kernels_triton.attention.plan import plan_of
from attn_kernels_triton.tuning import chosen, table
from attn_kernels_triton.tuning.__main__ import main
from attn_kernels_triton.tuning.candidates import CANDIDATES, kind_of
from attn_kernels_triton.tuning.measure import Measured, best

DEVICE = "NVIDIA H200"
KIND = "128 causal long"
CHOICE = CANDIDATES[128][2]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder for what is measured."""
    monkeypatch.setenv(table.FOLDER, str(tmp_path))
    chosen.measured.cache_clear()
    yield tmp_path
    chosen.measured.cache_clear()


def plan(mask, length: int = 64):
    heads = Heads(query=1, key_value=1, key_size=128, value_size=128)
    rows = torch.zeros(1, length, 1, 128, dtype=torch.bfloat16)
    return plan_of(AttentionSpec(heads=heads, mask=mask), Operands(query=rows, key=rows, value=rows))


def test_what_is_shipped_is_the_first_candidate():
    assert {width: choices[0] for width, choices in CANDIDATES.items()} == tiles.DENSE_CHOICES


def test_what_was_measured_is_kept_and_added_to():
    assert table.read(DEVICE) == {}
    table.add(DEVICE, {KIND: CHOICE})
    table.add(DEVICE, {"64 full short": CANDIDATES[64][1]})
    assert table.read(DEVICE) == {KIND: CHOICE, "64 full short": CANDIDATES[64][1]}
    assert table.read("another device") == {}


def test_what_was_measured_is_taken_in_place_of_what_is_shipped(monkeypatch):
    monkeypatch.setattr(chosen, "name_of", lambda device: DEVICE)
    asked = plan(Causal(), 5000)
    assert kind_of(asked.sizes, asked.rule).name == KIND
    assert chosen.chosen(asked, torch.device("cpu")) == CANDIDATES[128][0]
    table.add(DEVICE, {KIND: CHOICE})
    chosen.measured.cache_clear()
    assert chosen.chosen(asked, torch.device("cpu")) == CHOICE
    assert chosen.chosen(plan(Full(), 5000), torch.device("cpu")) == CANDIDATES[128][0]


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
    path = table.add(DEVICE, {KIND: CHOICE})
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match="passed by"):
        assert table.read(DEVICE) == {}
    with pytest.warns(RuntimeWarning, match="passed by"):
        table.add(DEVICE, {KIND: CHOICE})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.read(DEVICE) == {KIND: CHOICE}


@pytest.mark.parametrize("choice", [[128, 128, 4, 9, "specialised"], [1], ["x"] * 5, 7])
def test_a_choice_that_is_no_candidate_is_passed_by(choice):
    path = table.add(DEVICE, {})
    path.write_text(json.dumps({"origin": table.origin(DEVICE), "choices": {KIND: choice}}))
    with pytest.warns(RuntimeWarning, match="passed by"):
        assert table.read(DEVICE) == {}


def test_processes_that_add_at_once_lose_nothing_of_one_another(folder):
    code = "import sys; from attn_kernels_triton.tuning import table"
    code += "; from attn_kernels_triton.tuning.candidates import CANDIDATES"
    code += f"; table.add({DEVICE!r}, {{sys.argv[1]: CANDIDATES[int(sys.argv[1].split()[0])][-1]}})"
    names = ["64 full long", "128 causal short"]
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in names]
    assert [process.wait(timeout=250) for process in running] == [0] * len(names)
    assert sorted(table.read(DEVICE)) == sorted(names)
    assert not list(folder.glob("*.part"))


def test_the_fastest_of_each_kind_is_kept():
    kind = kind_of(plan(Causal()).sizes, plan(Causal()).rule)
    found = [
        Measured(kind, choice, seconds) for choice, seconds in zip(CANDIDATES[128], (3.0, 2.0, 1.0, 4.0), strict=True)
    ]
    assert best(found) == {kind.name: CANDIDATES[128][2]}


def test_without_a_gpu_there_is_nothing_to_tune(capsys, monkeypatch):
    monkeypatch.setattr("attn_kernels_triton.tuning.__main__.absence", lambda: "this machine has no GPU")
    assert main() == 1
    assert "no GPU" in capsys.readouterr().err
