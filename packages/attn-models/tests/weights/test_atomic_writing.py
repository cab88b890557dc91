"""A folder is written whole or not at all: full disks, kills and failures leave the old one as it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed, InvalidValue
from attn_models.weights import read_folder, staged_folder, write_folder
from attn_models.weights.atomic_write import exchange, replace_in_two_steps

OLD = {"weight": torch.arange(4.0)}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", {"version": 1}, OLD)


def assert_untouched(target: Path) -> None:
    opened = read_folder(target)
    assert opened.config == {"version": 1}
    assert torch.equal(opened.tensors["weight"], OLD["weight"])


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    """A folder of notes, a downloaded model, a file: they are left as they are, and an empty folder is filled."""
    notes, downloaded, file, empty = (tmp_path / name for name in ("notes", "downloaded", "file", "empty"))
    for folder in (notes, downloaded, empty):
        folder.mkdir()
    kept = [notes / "diary.txt", downloaded / "config.json", file]
    for path in kept:
        path.write_text("{}")
    for target in (notes, downloaded, file):
        with pytest.raises(InvalidValue, match=f"target: '{target}' is not allowed; allowed: a new folder"):
            write_folder(target, {"version": 2}, OLD)
    assert [path.read_text() for path in kept] == ["{}"] * 3
    assert_untouched(write_folder(empty, {"version": 1}, OLD))
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "downloaded", "file", "empty"}


def test_a_file_system_that_refuses_more_bytes_leaves_the_old_folder_and_no_litter(target: Path) -> None:
    # A limit on the size of files makes the kernel refuse the write half-way, as a full disk does.
    code = """
import resource, sys, torch
from attn_core.errors import CheckpointWriteFailed
from attn_models.weights import write_folder
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    write_folder(sys.argv[1], {"version": 2}, {"weight": torch.ones(1_000_000)})
except CheckpointWriteFailed as error:
    print(error.reason, error.message)
"""
    result = run(code, target)
    assert result.stdout.startswith("CHECKPOINT_WRITE_FAILED"), result.stderr
    assert str(target) in result.stdout
    assert_untouched(target)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_failure_inside_leaves_the_old_folder_and_no_litter(target: Path) -> None:
    def half_way() -> None:
        with staged_folder(target) as stage:
            (stage / "config.json").write_text("{}")
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        half_way()
    assert_untouched(target)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_a_killed_writer_leaves_the_old_folder_and_the_next_one_cleans_up(target: Path) -> None:
    code = """
import os, signal, sys
from attn_models.weights import staged_folder
from pathlib import Path
with staged_folder(Path(sys.argv[1])) as stage:
    (stage / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, target).returncode == -9
    assert_untouched(target)
    assert len(list(target.parent.iterdir())) == 2
    write_folder(target, {"version": 3}, OLD)
    assert read_folder(target).config == {"version": 3}
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def test_the_unfinished_folder_of_a_living_writer_is_left_alone(target: Path) -> None:
    with staged_folder(target) as stage:
        (stage / "config.json").write_text('{"version": 4}')
        write_folder(target, {"version": 5}, OLD)
        assert stage.is_dir()


def test_a_folder_without_the_last_files_manifest_is_found_out(target: Path) -> None:
    (target / "model.safetensors").write_bytes((target / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors"):
        read_folder(target)


def test_a_file_in_the_way_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("keep")
    with pytest.raises(CheckpointWriteFailed):
        write_folder(tmp_path / "file" / "model", {}, OLD)
    assert (tmp_path / "file").read_text() == "keep"


@pytest.mark.parametrize("name", ["../escape.json", "a/b", ".."])
def test_a_side_file_cannot_be_written_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointInvalid):
        write_folder(tmp_path / "model", {}, OLD, {name: b"x"})
    assert list(tmp_path.iterdir()) == []


def test_replacing_in_two_steps_keeps_both_folders(tmp_path: Path) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    aside = replace_in_two_steps(new, old)
    assert (old / "name").read_text() == "new"
    assert (aside / "name").read_text() == "old"


def test_replacing_with_what_is_not_there_puts_the_old_folder_back(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    with pytest.raises(FileNotFoundError):
        replace_in_two_steps(tmp_path / "absent", old)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two names")
def test_exchanging_with_what_is_not_there_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "here", tmp_path / "absent")
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
