"""Checkpoint folders: what was written is read back, and what was tampered with is refused by name."""

from __future__ import annotations

import json
import pickle
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_models.weights import read_folder, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.linspace(-2, 2, 7).to(torch.bfloat16),
    "counts": torch.tensor([1, 2, 3]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    extra = {"tokenizer.json": b"{}", "generation_config.json": {"eos_token_id": 2}}
    return write_folder(tmp_path / "model", {"model_type": "llama"}, TENSORS, extra)


def unsealed(folder: Path) -> Path:
    (folder / "manifest.json").unlink()
    return folder


def raw_safetensors(header: str, data: bytes = b"") -> bytes:
    content = header.encode()
    return struct.pack("<Q", len(content)) + content + data


def test_what_was_written_is_read_back_bit_for_bit(folder: Path) -> None:
    opened = read_folder(folder)
    assert set(opened.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert opened.tensors[name].dtype == tensor.dtype
        assert torch.equal(opened.tensors[name], tensor)
        assert opened.tensors.entries[name].shape == tuple(tensor.shape)
    assert opened.config == {"model_type": "llama"}
    assert opened.generation_config == {"eos_token_id": 2}
    assert opened.tokenizer == folder / "tokenizer.json"
    assert opened.verified


def test_an_infinity_of_older_transformers_is_what_newer_ones_write_for_it(folder: Path) -> None:
    (unsealed(folder) / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    assert read_folder(folder).config == {"time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (folder / "config.json").write_text('{"time_step_limit": [0.0, -Infinity]}')
    with pytest.raises(CheckpointInvalid, match="-Infinity is not JSON"):
        read_folder(folder)


def test_changing_a_tensor_in_memory_does_not_change_the_file(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    read_folder(folder).tensors["a.weight"].fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before
    assert torch.equal(read_folder(folder).tensors["a.weight"], TENSORS["a.weight"])


def test_tensors_outlive_a_folder_that_is_replaced(folder: Path) -> None:
    tensor = read_folder(folder).tensors["a.weight"]
    write_folder(folder, {"model_type": "gpt2"}, {"a.weight": torch.zeros(3, 4)})
    assert torch.equal(tensor, TENSORS["a.weight"])
    assert read_folder(folder).config == {"model_type": "gpt2"}
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]


def test_the_manifest_lists_every_file_with_hash_and_size(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, record in files.items():
        assert record["size"] == (folder / name).stat().st_size


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
def test_a_changed_byte_in_any_file_is_found(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=f"{name}.*SHA-256"):
        read_folder(folder)


@pytest.mark.parametrize("verify", ["hashes", "sizes"])
def test_a_missing_or_longer_file_is_found(folder: Path, verify: str) -> None:
    with (folder / "config.json").open("ab") as file:
        file.write(b" ")
    with pytest.raises(CheckpointInvalid, match=r"config\.json.*bytes"):
        read_folder(folder, verify=verify)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"config\.json.*not in the folder"):
        read_folder(folder, verify=verify)


def test_a_file_beside_the_manifest_is_not_read(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", {}, TENSORS)
    (other / "generation_config.json").write_text("{}")
    with pytest.raises(CheckpointInvalid, match=r"generation_config\.json.*not listed"):
        read_folder(other)


@pytest.mark.parametrize("manifest", ["", "[]", "{}", '{"files": {"config.json": 3}}', '{"files": {"../x": {}}}'])
def test_a_malformed_manifest_is_refused(folder: Path, manifest: str) -> None:
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointInvalid, match=r"manifest\.json"):
        read_folder(folder)


def test_a_manifest_cannot_name_a_file_elsewhere(folder: Path) -> None:
    record = {"sha256": "0" * 64, "size": 0}
    (folder / "manifest.json").write_text(json.dumps({"files": {"../secret": record}}))
    with pytest.raises(CheckpointInvalid, match="secret"):
        read_folder(folder)


def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.json"
    outside.write_text('{"model_type": "llama"}')
    unsealed(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(outside)
    with pytest.raises(CheckpointInvalid, match="symbolic link"):
        read_folder(folder)


def test_keys_that_name_code_are_gone_at_any_depth(folder: Path) -> None:
    config = {"auto_map": {"AutoModel": "evil.Model"}, "text": [{"trust_remote_code": True, "size": 1}], "size": 2}
    (unsealed(folder) / "config.json").write_text(json.dumps(config))
    assert read_folder(folder).config == {"text": [{"size": 1}], "size": 2}


@pytest.mark.parametrize("config", ["", "[]", "nul", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a": "\\ud8'])
def test_a_malformed_configuration_is_refused(folder: Path, config: str) -> None:
    (unsealed(folder) / "config.json").write_text(config)
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        read_folder(folder)


class Canary:
    """A pickle of this creates a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt", "model.safetensors"])
@pytest.mark.parametrize("form", ["pickle2", "pickle5", "torch", "torch legacy"])
def test_a_pickle_under_any_name_is_refused_by_its_content_and_never_loaded(tmp_path, name, form) -> None:
    canary, path = tmp_path / "canary", tmp_path / "model" / name
    path.parent.mkdir()
    if form.startswith("pickle"):
        path.write_bytes(pickle.dumps(Canary(canary), protocol=int(form[-1])))
    else:
        torch.save(Canary(canary), path, _use_new_zipfile_serialization=form == "torch")
    (path.parent / "config.json").write_text("{}")
    with pytest.raises(CheckpointInvalid, match=rf"{name}.*(pickle|zip)"):
        read_folder(path.parent)
    assert not canary.exists()


def test_weights_that_are_no_safetensors_are_refused_whatever_they_hold(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"plain")
    with pytest.raises(CheckpointInvalid, match=r"model\.bin.*safetensors only"):
        read_folder(tmp_path)


HOSTILE = {
    "empty": b"",
    "seven bytes": b"1234567",
    "header of 2^62": struct.pack("<Q", 1 << 62) + b"{}",
    "header of 100 MB": struct.pack("<Q", 100 << 20) + b"{" + b" " * 1000,
    "duplicate keys": raw_safetensors(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "overlap": raw_safetensors(
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
        bytes(6),
    ),
    "hole": raw_safetensors('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', bytes(8)),
    "negative shape": raw_safetensors('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', bytes(4)),
    "overflowing shape": raw_safetensors(
        '{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}', bytes(4)
    ),
    "shape against size": raw_safetensors('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', bytes(4)),
    "unknown dtype": raw_safetensors('{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
    "deep nesting": raw_safetensors('{"a":' * 50_000),
    "an entry of text": raw_safetensors('{"a":"b"}'),
    "extra bytes": raw_safetensors('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', bytes(5)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_are_refused(folder: Path, name: str) -> None:
    (unsealed(folder) / "model.safetensors").write_bytes(HOSTILE[name])
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors"):
        read_folder(folder)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_mutated_safetensors_file_is_read_or_refused_and_nothing_else(data: st.DataObject, folder: Path) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    content = bytearray(save(TENSORS))
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content[: data.draw(st.sampled_from([None, None, 3, 100, -1]))])
    with suppress(CheckpointInvalid):
        dict(read_folder(folder).tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_not_finite_is_refused_by_name_unless_allowed(tmp_path, value, dtype) -> None:
    tensor = torch.ones(50, dtype=dtype)
    tensor[33] = value
    (tmp_path / "config.json").write_text("{}")
    save_file({"fine": torch.ones(2), "broken.weight": tensor}, tmp_path / "model.safetensors")
    opened = read_folder(tmp_path)
    assert torch.equal(opened.tensors["fine"], torch.ones(2))
    with pytest.raises(CheckpointInvalid, match=r"broken\.weight"):
        opened.tensors["broken.weight"]
    allowed = read_folder(tmp_path, nonfinite="allow").tensors["broken.weight"]
    assert torch.equal(allowed.isfinite(), tensor.isfinite())
    with pytest.raises(InvalidValue, match=r"broken\.weight"):
        write_folder(tmp_path / "new", {}, {"broken.weight": tensor})
    assert not (tmp_path / "new").exists()


def test_tensors_that_share_memory_are_refused_by_both_names(tmp_path: Path) -> None:
    tied = torch.ones(4)
    with pytest.raises(InvalidValue, match=r"embed and head"):
        write_folder(tmp_path / "tied", {}, {"embed": tied, "head": tied})


def sharded(folder: Path, weight_map: dict[str, str]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    save_file({"b": torch.ones(2)}, folder / "two.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    opened = read_folder(sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"}))
    assert {name: tensor.numel() for name, tensor in opened.tensors.items()} == {"a": 1, "b": 2}
    assert not opened.verified


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": "one.safetensors", "b": "three.safetensors"}, "three.safetensors"),
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is not in one"),
        ({"b": "two.safetensors", "a": "two.safetensors"}, "'a' is not in two"),
        ({"a": "../m/one.safetensors"}, "directly in the folder"),
        ({"a": 3}, "weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path, weight_map, says) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        read_folder(sharded(tmp_path / "m", weight_map))


@pytest.mark.parametrize("name", ["hidden", "b", "layers.0.attn.proj.bias"])
def test_a_weight_that_the_index_leaves_out_is_refused(tmp_path: Path, name: str) -> None:
    """The index names `b` in another shard."""
    folder = sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(1), name: torch.ones(1)}, folder / "one.safetensors")
    with pytest.raises(CheckpointInvalid, match=f"'{name}' of one"):
        read_folder(folder)


@pytest.mark.parametrize("name", ["h.0.attn.bias", "h.0.attn.masked_bias", "layers.0.self_attn.rotary_emb.inv_freq"])
def test_the_index_may_leave_out_a_buffer(tmp_path: Path, name: str) -> None:
    folder = sharded(tmp_path / "m", {"a": "one.safetensors", "b": "two.safetensors"})
    save_file({"a": torch.ones(1), name: torch.ones(1)}, folder / "one.safetensors")
    assert read_folder(folder).tensors["a"] == 1
    save_file({"b": torch.ones(2), name: torch.ones(1)}, folder / "two.safetensors")
    listed = {"a": "one.safetensors", "b": "two.safetensors", name: "one.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointInvalid, match="of two"):
        read_folder(folder)
