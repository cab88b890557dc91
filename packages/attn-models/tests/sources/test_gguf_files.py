"""A GGUF file in the place of a model folder: what `attn convert` makes of it, made once and whole; else refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from attn_core.errors import CheckpointInvalid, CheckpointWriteFailed, Incompatible, UnknownName
from attn_models.loading import load_model
from attn_models.sources import ModelStore, Step, convert, gguf_files, is_complete
from attn_models.sources.gguf_files import folder_of_gguf
from attn_models.weights.manifest import read_manifest


def hashes(folder: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in read_manifest(folder).items()}


def test_the_folder_of_a_file_is_what_convert_writes(quantised_llama, tmp_path: Path) -> None:
    converted = convert(quantised_llama.path, tmp_path / "folder")
    kept = folder_of_gguf(quantised_llama.path, tmp_path)
    assert hashes(kept) == hashes(converted)
    tokens = torch.tensor([[1, 50, 60, 70, 2]])
    with torch.inference_mode():
        assert torch.equal(load_model(kept).model(tokens), load_model(converted).model(tokens))
    blocks = json.loads((kept / "config.json").read_text())["quantization_config"]["blocks"]
    assert set(blocks.values()) == {"Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}


def test_a_model_in_parts_is_the_same_whichever_part_is_named(parts, tiny_llama, tmp_path: Path) -> None:
    assert [part.name for part in parts] == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    tokens = torch.tensor([[1, 50, 60, 70, 2]])
    whole = load_model(convert(tiny_llama.path, tmp_path / "whole")).model(tokens)
    for part in parts:
        assert torch.equal(load_model(folder_of_gguf(part, tmp_path)).model(tokens), whole)
    first = folder_of_gguf(parts[0], tmp_path)
    with parts[1].open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    assert folder_of_gguf(parts[0], tmp_path) != first  # whichever part has changed
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CheckpointInvalid, match=r"tiny-00002-of-00003\.gguf: is not part 2 of 3"):
        folder_of_gguf(parts[0], tmp_path)
    parts[1].unlink()
    with pytest.raises(CheckpointInvalid, match=r"tiny-00002-of-00003\.gguf: cannot be read"):
        folder_of_gguf(parts[0], tmp_path)


def test_a_store_finds_a_file_and_a_name_goes_before_it(tiny_llama, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_bytes(tiny_llama.path.read_bytes())
    store = ModelStore(tmp_path / "home")
    found = store.find("tiny")
    assert found == folder_of_gguf(tiny_llama.path, tmp_path / "home")
    assert store.names() == []  # a cache is no model that somebody put there
    convert(tiny_llama.path, tmp_path / "home" / "models" / "tiny")
    assert store.find("tiny") == tmp_path / "home" / "models" / "tiny"


def test_a_model_is_loaded_from_the_file_itself(tiny_llama, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("ATTN_HOME", str(tmp_path))
    loaded = load_model(tiny_llama.path)
    assert loaded.tokenizer.encode("hello", add_special=False) == [tiny_llama.tokens.index("hello")]
    assert loaded.path == folder_of_gguf(tiny_llama.path, tmp_path)


def test_a_file_is_converted_once_until_its_bytes_change(tiny_llama, quantised_llama, tmp_path: Path) -> None:
    steps: list[Step] = []
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny_llama.path.read_bytes())
    first = folder_of_gguf(file, tmp_path, steps.append)
    assert steps[-1].done == steps[-1].total == len(tiny_llama.weights)
    steps.clear()
    file.rename(tmp_path / "called-otherwise.gguf")
    assert folder_of_gguf(tmp_path / "called-otherwise.gguf", tmp_path, steps.append) == first
    assert steps == []
    file.write_bytes(quantised_llama.path.read_bytes())
    assert folder_of_gguf(file, tmp_path) != first


def test_a_known_file_is_not_read_again_unless_it_may_have_changed(tiny_llama, tmp_path: Path, monkeypatch) -> None:
    read: list[Path] = []
    hashed = gguf_files.file_sha256
    monkeypatch.setattr(gguf_files, "file_sha256", lambda path: (read.append(path), hashed(path))[1])
    file = tmp_path / "model.gguf"
    file.write_bytes(tiny_llama.path.read_bytes())

    def opened() -> int:
        read.clear()
        assert folder_of_gguf(file, tmp_path) == first
        return len(read)

    first = folder_of_gguf(file, tmp_path)
    assert opened() == 1  # it has just been written
    for changed in (1e9, 1.1e9):
        os.utime(file, (changed, changed))
        assert [opened(), opened()] == [1, 0]
    (first / "model.safetensors").unlink()
    assert [opened(), opened()] == [1, 0]


def test_what_is_left_of_a_folder_is_made_again(tiny_llama, tmp_path: Path) -> None:
    kept = folder_of_gguf(tiny_llama.path, tmp_path)
    (kept / "model.safetensors").unlink()
    assert folder_of_gguf(tiny_llama.path, tmp_path) == kept
    assert is_complete(kept)


def test_of_two_processes_at_once_both_get_the_whole_folder(tiny_llama, tmp_path: Path) -> None:
    program = (
        "import sys; from attn_models.sources import is_complete; "
        "from attn_models.sources.gguf_files import folder_of_gguf; from pathlib import Path; "
        "folder = folder_of_gguf(sys.argv[1], Path(sys.argv[2])); assert is_complete(folder); print(folder)"
    )
    command = [sys.executable, "-c", program, str(tiny_llama.path), str(tmp_path)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert told[0] == told[1] != ""
    assert [path.name for path in (tmp_path / "gguf").iterdir() if not path.name.startswith(".")] == [
        Path(told[0]).name
    ]


def test_a_home_that_cannot_be_written_to_leaves_a_folder_of_this_process(tiny_llama, tmp_path: Path) -> None:
    # Not a folder without permission, in which root may write: below a file nobody may.
    (tmp_path / "file").touch()
    made = folder_of_gguf(tiny_llama.path, tmp_path / "file")
    assert is_complete(made)
    assert not made.is_relative_to(tmp_path)
    assert folder_of_gguf(tiny_llama.path, tmp_path / "file") == made


def test_a_folder_in_a_home_that_cannot_be_written_to_is_used(tiny_llama, tmp_path: Path, monkeypatch) -> None:
    kept = folder_of_gguf(tiny_llama.path, tmp_path)
    monkeypatch.setattr("attn_models.sources.gguf_files.exclusive", None)  # nothing is locked, nothing written
    assert folder_of_gguf(tiny_llama.path, tmp_path) == kept


def test_a_full_disk_is_told(tiny_llama, tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, hard))
    try:
        with pytest.raises(CheckpointWriteFailed):
            folder_of_gguf(tiny_llama.path, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def described(path: Path, architecture: str = "llama", **values: int | str) -> Path:
    """A well-formed file with these keys and one tensor."""
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        name = key.replace("_", ".", 1)
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("architecture", "values", "said"),
    [
        ("llama", {"split_count": 3, "split_no": 1}, "part 2 of 3 of a model.*NAME-00001-of-00003"),
        ("llama", {"general_type": "adapter"}, "a LoRA adapter; load it on its base model"),
        ("clip", {}, "the image or audio encoder of a model"),
        ("llama", {"general_type": "mmproj"}, "the image or audio encoder of a model"),
        ("llama", {"general_type": "imatrix"}, "statistics for quantising"),
        ("llama", {"general_type": "controlvector"}, "has general.type 'controlvector'; allowed: 'model'"),
    ],
)
def test_a_file_that_is_no_whole_model_is_refused_with_what_it_is(tmp_path, architecture, values, said) -> None:
    file = described(tmp_path / "file.gguf", architecture, **values)
    with pytest.raises(Incompatible, match=said):
        folder_of_gguf(file, tmp_path)
    with pytest.raises(Incompatible, match=said):
        convert(file, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_a_joined_file_is_a_model(tmp_path: Path) -> None:
    # llama-gguf-split leaves split.count = 0 in what it joins.
    with pytest.raises(CheckpointInvalid, match=r"llama.block_count"):
        folder_of_gguf(described(tmp_path / "file.gguf", split_count=0), tmp_path)


def test_a_damaged_file_another_file_and_one_that_is_not_there_are_refused(tiny_llama, tmp_path: Path) -> None:
    whole = tiny_llama.path.read_bytes()
    cut, other, pickled = tmp_path / "cut.gguf", tmp_path / "other.gguf", tmp_path / "pickle.gguf"
    cut.write_bytes(whole[:-1000])
    other.write_bytes(b"{}" + whole[2:])
    pickled.write_bytes(b"\x80\x04" + whole)
    for file, said in ((cut, "which is truncated"), (other, "begins with"), (pickled, "can run code")):
        with pytest.raises(CheckpointInvalid, match=said):
            ModelStore(tmp_path / "home").find(str(file))
    with pytest.raises(UnknownName):
        ModelStore(tmp_path / "home").find(str(tmp_path / "none.gguf"))
    assert not (tmp_path / "home" / "gguf").exists() or not [*(tmp_path / "home" / "gguf").glob("[!.]*")]


def test_a_key_that_is_not_known_is_refused_by_name(tiny_llama, tmp_path: Path) -> None:
    file = described(tmp_path / "file.gguf", llama_new_thing=3)
    with pytest.raises(Incompatible, match=r"llama\.new_thing"):
        folder_of_gguf(file, tmp_path)
