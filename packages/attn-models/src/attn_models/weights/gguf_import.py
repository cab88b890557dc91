"""Imports weights from a GGUF file, dequantised in a process with limited memory and time."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any
from weakref import WeakKeyDictionary

from attn_core.errors import CheckpointInvalid, starting

from attn_models.weights.gguf_architectures import Placement, architecture_of, matched
from attn_models.weights.gguf_child import (
    BYTES_OF,
    REFUSED,
    SHARD_BYTES,
    ShardPlan,
    WeightDtype,
    blocks_kept,
    plan_shards,
    written_as,
)
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.safetensors_files import INDEX_NAME, read_header

TensorProgress = Callable[[int, int], None]
"""Called with the number of tensors done and the total number of tensors."""

ENDS = ("eot", "eom")
"""Tokens that end a turn or a message, at which generation also stops."""

BASE_BYTES = 1 << 30
BASE_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 1 << 20


def gguf_config(header: GgufHeader, dtype: WeightDtype) -> dict[str, Any]:
    """The Hugging Face config.json for the model in `header`, with weights stored in `dtype`.

    Matrices that stay in their blocks are listed in its `quantization_config`.
    """
    config = architecture_of(header).config(header)
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    tokens: dict[str, Any] = {
        name: header.metadata.get(f"tokenizer.ggml.{word}_token_id") for name, word in ids.items()
    }
    others = [header.metadata.get(f"tokenizer.ggml.{word}_token_id") for word in ENDS]
    ends = list(dict.fromkeys(end for end in (tokens["eos_token_id"], *others) if end is not None))
    if len(ends) > 1:
        tokens["eos_token_id"] = ends
    if dtype != "stored":
        return {**config, **tokens, "dtype": dtype}
    placements, _ = placed_shards(header, dtype)
    sources = {name: header.tensors[placement.source] for name, placement in placements.items()}
    blocks = {name: tensor.type for name, tensor in sources.items() if blocks_kept(tensor, placements[name])}
    # Possibly no matrix is in such blocks.
    described = {"quantization_config": {"quant_method": "gguf", "version": 1, "blocks": blocks}} if blocks else {}
    return {**config, **tokens, **described, "dtype": "float32"}


def import_gguf_weights(
    header: GgufHeader, folder: Path, dtype: WeightDtype, progress: TensorProgress | None = None
) -> None:
    """Write the tensors of the checked `header` as safetensors into the existing `folder`, dequantised or as `stored`.

    The work is done by `gguf_child` in a separate process: its memory is limited to what the file's sizes justify, its
    time to a minute plus a second for each MiB of weights. Its output is checked against the header before it is used.

    Raises CheckpointInvalid for a file that is refused, or on which the process runs out of memory or time.
    """
    placements, plan = placed_shards(header, dtype)
    files = {file: [asdict(placements[name]) for name in names] for file, names in plan.files.items()}
    whole = [math.prod(placement.shape) for placement in placements.values()]
    largest = max(*(tensor.elements for tensor in header.tensors.values()), *whole)
    memory = BASE_BYTES + 2 * min(plan.total_bytes, SHARD_BYTES + largest * BYTES_OF.get(dtype, 4)) + 24 * largest
    seconds = BASE_SECONDS + plan.total_bytes / SLOWEST_BYTES_PER_SECOND
    _run_child(header, [str(header.path), str(folder), dtype, str(memory)], files, (seconds, progress))
    shapes = {name: written_as(header.tensors[p.source], p, dtype)[1] for name, p in placements.items()}
    _check_result(header, folder, shapes, plan)
    if len(plan.files) > 1:
        index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": plan.weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


_PLACED: WeakKeyDictionary[GgufHeader, dict[str, Placement]] = WeakKeyDictionary()


def _placed(header: GgufHeader) -> dict[str, Placement]:
    """The placements by Hugging Face name, for which a model without memory is built (0.1 s and more): once a header,
    and no longer than it lives, as a vocabulary takes tens of megabytes."""
    if header in _PLACED:
        return _PLACED[header]
    architecture = architecture_of(header)
    config = architecture.config(header)
    placed, has_factors = architecture.placements(header, config), "rope_parameters" in config
    found = matched(header, placed, architecture.name, has_factors=has_factors)
    _PLACED[header] = {placement.target: placement for placement in found}
    return _PLACED[header]


def placed_shards(header: GgufHeader, dtype: WeightDtype) -> tuple[dict[str, Placement], ShardPlan]:
    """The placements by Hugging Face name, and their distribution over files."""
    placements = _placed(header)
    written = {name: written_as(header.tensors[p.source], p, dtype) for name, p in placements.items()}
    sizes = {name: math.prod(shape) * BYTES_OF.get(element, 1) for name, (element, shape) in written.items()}
    return placements, plan_shards(sizes)


def _run_child(
    header: GgufHeader,
    arguments: list[str],
    files: dict[str, list[dict[str, Any]]],
    limits: tuple[float, TensorProgress | None],
) -> None:
    seconds, progress = limits
    command = [sys.executable, "-m", "attn_models.weights.gguf_child", *arguments]
    # One thread: on a machine with many cores the stacks of numpy's threads alone would exhaust the memory limit.
    alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as given:
        given.write(json.dumps(files).encode())
        given.seek(0)
        with starting("the import of a GGUF file"):
            started = subprocess.Popen(command, stdin=given, stdout=subprocess.PIPE, stderr=errors, env=alone)
        with started as child:
            timer = threading.Timer(seconds, child.kill)
            timer.start()
            try:
                refused = _follow(child.stdout, progress)
                status = child.wait()
            finally:
                timer.cancel()
                child.kill()
        if status == REFUSED and refused:
            raise CheckpointInvalid(refused, path=header.path, rule=refused)
        if status != 0:
            errors.seek(0)
            last = errors.read()[-4096:].decode("utf-8", "replace").strip().splitlines()[-1:]
            why = last[0] if last else f"killed, with {seconds:.0f} s and {arguments[-1]} bytes of memory allowed"
            raise CheckpointInvalid.of(header.path, f"cannot be dequantised: {why}")


def _follow(output: IO[bytes] | None, progress: TensorProgress | None) -> str | None:
    refused = None
    for line in output or ():
        message = json.loads(line)
        refused = message.get("refused", refused)
        if progress is not None and "done" in message:
            progress(message["done"], message["total"])
    return refused


def _check_result(header: GgufHeader, folder: Path, shapes: dict[str, tuple[int, ...]], plan: ShardPlan) -> None:
    for file, names in plan.files.items():
        entries = read_header(folder / file)
        if {name: entry.shape for name, entry in entries.items()} != {name: shapes[name] for name in names}:
            raise CheckpointInvalid.of(header.path, f"the tensors written to {file} are not those of the file")
