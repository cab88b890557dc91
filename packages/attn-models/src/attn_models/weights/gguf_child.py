"""The process that dequantises a GGUF file: `python -m attn_models.weights.gguf_child FILE FOLDER DTYPE BYTES`.

It limits its own memory to BYTES, reads the header again with the strict reader, writes safetensors
into FOLDER and tells of each tensor in a line of JSON on standard output. No torch, no pickle.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
from attn_core.errors import AttnError
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from attn_models.weights.architectures import architecture_of
from attn_models.weights.gguf_guard import read_gguf_header
from attn_models.weights.gguf_header import GgufHeader
from attn_models.weights.gguf_tensor import BYTES_OF, WeightDtype, dequantised, half_split_rows, stored
from attn_models.weights.placement import Placement
from attn_models.weights.shard_plan import ShardPlan, plan_shards

REFUSED = 3
"""Exit status after a line {"refused": rule}."""


def placed_shards(header: GgufHeader, dtype: WeightDtype) -> tuple[dict[str, Placement], ShardPlan]:
    """The placements by Hugging Face name, and their distribution over files."""
    architecture = architecture_of(header)
    found = architecture.placements(header, architecture.config(header))
    placements = {placement.target: placement for placement in found}
    sizes = {name: header.tensors[p.source].elements * BYTES_OF[dtype] for name, p in placements.items()}
    return placements, plan_shards(sizes)


def write_shards(header: GgufHeader, folder: Path, dtype: WeightDtype) -> None:
    """Dequantise every tensor of the file into safetensors in `folder`."""
    placements, plan = placed_shards(header, dtype)
    done = 0
    for file, names in plan.files.items():
        arrays: dict[str, NDArray[Any]] = {}
        for name in names:
            arrays[name] = _values(header, placements[name], dtype)
            done += 1
            _tell({"done": done, "total": len(placements)})
        serialize_file(_specs(arrays, dtype), folder / file, {"format": "pt"})


def main(arguments: list[str]) -> int:
    """Run the conversion; the exit status is 0, or REFUSED after the rule was printed."""
    file, folder, dtype, limit = arguments
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    try:
        write_shards(read_gguf_header(file), Path(folder), "float32" if dtype == "float32" else "bfloat16")
    except AttnError as error:
        _tell({"refused": error.message})
        return REFUSED
    return 0


def _tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _specs(arrays: dict[str, NDArray[Any]], dtype: WeightDtype) -> dict[str, TensorSpec]:
    # safetensors.numpy knows no bfloat16, so the bits are handed over by address; `arrays` keeps them alive.
    return {
        name: TensorSpec(dtype=dtype, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in arrays.items()
    }


def _values(header: GgufHeader, placement: Placement, dtype: WeightDtype) -> NDArray[Any]:
    values: NDArray[np.float32] = dequantised(header, header.tensors[placement.source])
    if placement.rotary_heads:
        values = half_split_rows(values, placement.rotary_heads)
    if placement.above:
        values = values - np.float32(placement.above)
    return stored(values, dtype)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
