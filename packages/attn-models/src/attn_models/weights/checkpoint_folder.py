"""Checkpoint folders in the Hugging Face layout: config.json, safetensors, tokenizer files, manifest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_core.errors import CheckpointInvalid, InvalidValue

from attn_models.weights.atomic_write import staged_folder
from attn_models.weights.manifest import Verify, listed_member, read_manifest, require_listed, verify_manifest
from attn_models.weights.safe_files import member, read_config, without_code
from attn_models.weights.safetensors_files import WEIGHTS_NAME, LazyTensors, Nonfinite, is_finite, weight_files

if TYPE_CHECKING:
    import torch


CONFIG_NAME = "config.json"
GENERATION_NAME = "generation_config.json"
VOCABULARY_NAME = "tokenizer.json"
VOCABULARY_NAMES = (VOCABULARY_NAME, "tokenizer.model", "spiece.model", "sentencepiece.model")
"""The files that a tokenizer is read from, in this order: the last are those of SentencePiece."""
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"

ExtraFile = bytes | Path | Mapping[str, Any]
"""The content of a side file: bytes, a file to copy, or an object to write as JSON."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A checkpoint folder opened for reading.

    `config` and `generation_config` have no keys that name code. `tensors` reads lazily. `tokenizer` is the path of
    the file with its vocabulary, None when the folder has none. `verified` is whether the folder was checked against a
    manifest.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: LazyTensors
    tokenizer: Path | None
    verified: bool


def vocabulary_file(folder: Path) -> Path | None:
    """The file of a folder that its tokenizer is read from; raises `CheckpointInvalid` if its manifest lacks it."""
    records = read_manifest(folder)
    found = (listed_member(folder, name, records) for name in VOCABULARY_NAMES)
    return next((path for path in found if path is not None), None)


def read_folder(
    path: str | Path,
    *,
    verify: Verify = "hashes",
    nonfinite: Nonfinite = "refuse",
    device: torch.device | str = "cpu",
) -> CheckpointFolder:
    """Open the checkpoint folder at `path`; its tensors are read to `device`.

    With a manifest, every file is checked against it (`verify`: "hashes" reads every byte once, "sizes" only checks
    names and sizes), and a file that is read but not listed is refused. File contents never cause an import or run
    code.

    Raises CheckpointInvalid naming the file and the rule it breaks: tampered or missing files, pickles under any name,
    malformed safetensors or JSON, links and names that leave the folder. A tensor with NaN or infinity raises when it
    is read, unless `nonfinite` is "allow".
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointInvalid.of(folder, "is not a folder")
    records = read_manifest(folder)
    if records is not None:
        verify_manifest(folder, records, verify)
    files = weight_files(folder)
    for file in files:
        require_listed(file, records)
    generation = listed_member(folder, GENERATION_NAME, records)
    config = listed_member(folder, CONFIG_NAME, records)
    if config is None:
        raise CheckpointInvalid.of(folder / CONFIG_NAME, "is missing")
    return CheckpointFolder(
        path=folder,
        config=read_config(config),
        generation_config=read_config(generation) if generation else {},
        tensors=LazyTensors(files, nonfinite, device),
        tokenizer=vocabulary_file(folder),
        verified=records is not None,
    )


def write_folder(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    extra_files: Mapping[str, ExtraFile] | None = None,
    source: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint folder with one model.safetensors, replacing a folder already at `path`.

    The folder appears completely, with its manifest, or the old one stays untouched. `extra_files` are side files by
    name, such as tokenizer.json or generation_config.json; `source` describes the origin of the model in the manifest.

    Raises InvalidValue for a tensor with NaN or infinity or two tensors sharing memory (leave one out and tie them when
    loading), and CheckpointWriteFailed when the file system fails.
    """
    from safetensors.torch import save_file

    target = Path(path)
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise InvalidValue.of(f"tensors[{name!r}]", "NaN or infinity", "finite values")
    _refuse_shared(tensors)
    with staged_folder(target, source) as stage:
        write_side_files(stage, {CONFIG_NAME: without_code(dict(config)), **(extra_files or {})})
        ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(ready, stage / WEIGHTS_NAME, metadata={"format": "pt"})
    return target


def write_side_files(folder: Path, files: Mapping[str, ExtraFile]) -> None:
    """Write each file of `files` into `folder`. Raises OSError, and CheckpointInvalid for unsafe names."""
    for name, content in files.items():
        target = member(folder, name)
        if isinstance(content, bytes):
            target.write_bytes(content)
        elif isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refuse_shared(tensors: Mapping[str, torch.Tensor]) -> None:
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = owners.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if first != name:
            raise InvalidValue.of("tensors", f"{first} and {name} sharing memory", "tensors that do not share memory")
