"""The safetensors files of a folder: one, or several under an index."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import CheckpointInvalid

from attn_models.weights.members import member, refuse_folder_without_weights
from attn_models.weights.safetensors_header import TensorEntry, read_header
from attn_models.weights.strict_json import read_json_object

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 32 << 20


def weight_files(folder: Path) -> dict[Path, dict[str, TensorEntry]]:
    """The weight files of `folder`, each with the header entries of its tensors.

    Raises CheckpointInvalid when there are none, a shard is missing, or index and shards disagree.
    """
    single = member(folder, WEIGHTS_NAME)
    if single.is_file():
        return {single: read_header(single)}
    index = member(folder, INDEX_NAME)
    if not index.is_file():
        refuse_folder_without_weights(folder)
    weight_map = read_json_object(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointInvalid.of(index, "an index needs an object 'weight_map' from tensor names to file names")
    files = {}
    for name in sorted(set(weight_map.values())):
        path = member(folder, name)
        if not path.is_file():
            raise CheckpointInvalid.of(path, f"is missing; {INDEX_NAME} names it")
        files[path] = read_header(path)
    _compare(index, weight_map, files)
    return files


def _compare(index: Path, weight_map: dict[str, str], files: dict[Path, dict[str, TensorEntry]]) -> None:
    found = {(tensor, path.name) for path, entries in files.items() for tensor in entries}
    told = set(weight_map.items())
    for tensor, name in sorted(told - found):
        raise CheckpointInvalid.of(index, f"tensor {tensor!r} is not in {name}")
    for tensor, name in sorted(found - told):
        raise CheckpointInvalid.of(index, f"tensor {tensor!r} of {name} is not in the index")
