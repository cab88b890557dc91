"""What `attn tune` measures."""

import dataclasses

import pytest
import torch
from attn_core import installed
from attn_core.kernels import devices, measured
from attn_variants import tuning
from attn_variants.kernels.attend import Banded, TorchSdpa
from attn_variants.tuning import Case, cases, is_right, measure, table_of

CPU = torch.device("cpu")
GPU = devices.Gpu("NVIDIA H200", (9, 0))


def case(**fields):
    known = {"dtype": torch.float32, "head_dim": 8, "mask": "causal", "keys": 64, "gradients": True}
    return Case(**known | fields)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tuning, "TOKENS", 128)
    monkeypatch.setattr(tuning, "HEADS", 2)


@pytest.mark.parametrize("fields", [{}, {"mask": "full", "gradients": False}, {"mask": "window"}], ids=str)
def test_every_kernel_that_accepts_is_timed(fields):
    (row,) = measure([case(**fields)], CPU)
    able = {kernel.name for kernel in tuning.accepting(case(**fields), CPU)}
    assert {"plain", "torch_sdpa"} <= able
    assert set(row.microseconds) == able
    assert all(time > 0 for time in row.microseconds.values())
    assert (row.call.queries, row.call.keys, row.call.gradients) == (64, 64, fields.get("gradients", True))


def test_one_query_is_a_call_of_its_own():
    (row,) = measure([case(mask="full", gradients=False, decoding=True)], CPU)
    assert (row.call.queries, row.call.keys) == (1, 64)


def test_a_kernel_that_is_wrong_or_raises_is_noted_as_failed(monkeypatch):
    right = TorchSdpa.run
    assert is_right(TorchSdpa(), case(), CPU)
    monkeypatch.setattr(TorchSdpa, "run", lambda self, spec, inputs: 1.1 * right(self, spec, inputs))

    def raising(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(Banded, "run", raising)
    (row,) = measure([case(mask="window")], CPU)
    assert row.microseconds["torch_sdpa"] is None
    assert row.microseconds["banded"] is None
    assert row.microseconds["plain"] > 0


def test_a_kernel_whose_gradients_alone_are_wrong_is_not_right(monkeypatch):
    right = TorchSdpa.run

    def scaled(self, spec, inputs):
        out = right(self, spec, inputs)
        out.register_hook(lambda gradient: 1.1 * gradient)
        return out

    monkeypatch.setattr(TorchSdpa, "run", scaled)
    assert not is_right(TorchSdpa(), case(), CPU)


def test_scores_that_would_not_fit_are_not_measured(monkeypatch):
    monkeypatch.setattr(tuning, "MOST_SCORES", 64)
    (row,) = measure([case()], CPU)
    assert "plain" not in row.microseconds


def test_nothing_is_begun_after_the_time(monkeypatch):
    assert list(measure([case()], CPU, seconds=-1)) == []


def test_every_case_is_a_kind_of_call_of_its_own_that_can_be_looked_up(monkeypatch):
    monkeypatch.undo()
    calls = [found.problem("cuda").measured_as() for found in cases(dtypes=(torch.bfloat16, torch.float16))]
    assert None not in calls
    assert len({tuple(call.items()) for call in calls}) == len(calls)


def test_what_was_measured_decides_where_it_is_kept(tmp_path):
    (row,) = measure([case()], CPU)
    call = dataclasses.replace(row.call)
    path = measured.write(tmp_path / "costs.json", table_of([row], GPU))
    table = measured.read(path)
    for name, time in row.microseconds.items():
        assert table.share(call, name) == pytest.approx(time / row.microseconds["plain"])
    assert (table.device, table.capability) == GPU
    assert table.origin["torch"] == torch.__version__


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch):
    from attn_core.errors import Incompatible
    from attn_variants.commands import tune

    monkeypatch.setattr(devices, "nvidia_gpu", lambda: None)
    with pytest.raises(Incompatible, match="GPU"):
        tune()
    assert installed().commands.get("tune").target == "attn_variants.commands:tune"
