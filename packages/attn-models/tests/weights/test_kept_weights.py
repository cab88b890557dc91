"""Packed weights that are kept beside a model are those that packing gives, or they are packed again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from attn_models.loading import load_model
from attn_models.quantization.kept import FOLDER
from attn_models.sources import convert
from attn_models.weights import safetensors_files
from attn_models.weights.safetensors_files import SMAPS

kept = pytest.importorskip("attn_kernels_cpu.kept")
compiling = pytest.importorskip("attn_kernels_cpu.compiling")
pytestmark = pytest.mark.skipif(compiling.why_not() is not None or not SMAPS.exists(), reason="kernels, and Linux")
TOKENS = torch.tensor([[1, 50, 60, 70, 2]])


def output(folder: Path) -> torch.Tensor:
    """The logits of the packed model, once everything is on the disk."""
    with torch.inference_mode():
        found = load_model(folder, quantization="auto", verify="sizes").model(TOKENS)
    kept._TO_DISK.submit(lambda: None).result()
    return found


@pytest.fixture
def folder(quantised_llama, tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("ATTN_HOME", str(tmp_path))
    return convert(quantised_llama.path, tmp_path / "models" / "tiny")


def files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / FOLDER).glob("*/*/*") if path.is_file())


def test_a_second_opening_maps_what_the_first_has_packed(folder: Path, monkeypatch) -> None:
    first, made = output(folder), files(folder)
    assert made
    monkeypatch.setattr(kept.KeptFile, "write", lambda *_: pytest.fail("packed again"))
    whole = load_model(folder, quantization="auto")
    assert torch.equal(whole.model(TOKENS), first)
    assert any(str(made[0]) in line for line in SMAPS.read_text().splitlines())


def test_other_content_and_damaged_files_are_packed_again(folder: Path, tmp_path: Path, monkeypatch) -> None:
    first, made = output(folder), files(folder)
    made[0].write_bytes(b"half")
    assert torch.equal(output(folder), first)
    weights = folder / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4:] = b"\0\0\0\x3f"  # the last number becomes 0.5; the size stays
    weights.write_bytes(raw)
    os.utime(weights, ns=(1, 1))
    changed = output(folder)
    assert not set(files(folder)) & set(made)
    monkeypatch.setenv("ATTN_HOME", str(tmp_path / "other"))
    assert torch.equal(output(folder), changed)
    assert not torch.equal(changed, first)


def test_a_home_that_cannot_be_written_is_said_once_and_a_folder_elsewhere_is_left_as_it_is(
    folder: Path, tmp_path: Path, monkeypatch, caplog
) -> None:
    (folder / FOLDER).write_bytes(b"no folder")
    kept._say_once.cache_clear()
    assert torch.equal(output(folder), output(folder))
    assert sum(str(folder) in record.message for record in caplog.records) == 1
    (folder / FOLDER).unlink()
    monkeypatch.setenv("ATTN_HOME", str(tmp_path / "other"))
    output(folder)
    assert not (folder / FOLDER).exists()


def test_weights_larger_than_memory_are_loaded_and_what_they_need_is_said(folder: Path, monkeypatch, caplog) -> None:
    first, size = output(folder), (folder / "model.safetensors").stat().st_size
    assert not caplog.records
    monkeypatch.setattr(safetensors_files, "usable_memory", lambda: size - 1)
    assert torch.equal(output(folder), first)
    (record,) = caplog.records
    assert record.args[1:] == (size / 1e9, (size - 1) / 1e9)


def test_a_full_disk_keeps_nothing_and_is_said_once(folder: Path, monkeypatch, caplog) -> None:
    kept._say_once.cache_clear()
    monkeypatch.setattr(os, "fsync", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"1"))
    assert torch.equal(output(folder), output(folder))
    assert not files(folder)
    assert sum("No space left" in record.getMessage() for record in caplog.records) == 1
