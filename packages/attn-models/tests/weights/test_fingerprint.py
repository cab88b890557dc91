"""A fingerprint changes with whatever a model is read from, and is that of a copy on another machine."""

from __future__ import annotations

import os
import shutil

import pytest
from attn_models.weights.manifest import READ, SAMPLED_BYTES, fingerprint


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    for ending in READ:
        (made / f"file{ending}").write_bytes(b"abc" * 1000)
    return made


@pytest.mark.parametrize("ending", sorted(READ))
def test_every_file_that_is_read_counts_with_its_content(folder, ending):
    before = fingerprint(folder)
    path = folder / f"file{ending}"
    path.write_bytes(b"abc" * 999 + b"abd")
    changed = fingerprint(folder)
    path.rename(folder / f"other{ending}")
    renamed = fingerprint(folder)
    (folder / f"other{ending}").unlink()
    assert len({before, changed, renamed, fingerprint(folder)}) == 4


def test_a_copy_and_what_is_not_read_change_nothing(folder, tmp_path):
    before = fingerprint(folder)
    shutil.copytree(folder, tmp_path / "copy" / "model")
    (folder / "README.md").write_text("words")
    os.utime(folder / "file.json", (1, 1))
    assert fingerprint(tmp_path / "copy" / "model") == fingerprint(folder) == before
    assert fingerprint(tmp_path / "nothing") == ""


def test_of_a_large_file_blocks_are_read_to_its_end(tmp_path):
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(3 * SAMPLED_BYTES)
    before = fingerprint(path)
    with path.open("r+b") as file:
        file.write(os.urandom(1 << 20))
    first = fingerprint(path)
    with path.open("r+b") as file:
        file.seek(-(1 << 20), os.SEEK_END)
        file.write(os.urandom(1 << 20))
    assert len({before, first, fingerprint(path)}) == 3
