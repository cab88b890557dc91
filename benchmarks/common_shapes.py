"""GGUF files with random weights in the shapes of models that people run, for benchmarks of speed and memory.

Only the sizes are those of the models: the vocabulary is the one of a folder with a tokenizer, padded to the model's
size with unused tokens. Files are kept and written once; each is the same for the same arguments.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from attn_models.export.gguf_vocabulary import vocabulary_keys
from attn_models.export.k_quants import quantize_k
from attn_models.tokenizers import Tokenizer
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

DEVIATION = 0.02
"""The standard deviation of a random weight."""
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model; `arch` is the name of its architecture in GGUF, `keys` has the keys that only it has."""

    arch: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    base: float
    tied: bool = True
    normed_heads: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """The name, outputs and inputs of each matrix."""
        query, shared = self.heads * self.head_size, self.kv_heads * self.head_size
        yield "token_embd", self.vocabulary, self.width
        for i in range(self.layers):
            yield f"blk.{i}.attn_q", query, self.width
            yield f"blk.{i}.attn_k", shared, self.width
            yield f"blk.{i}.attn_v", shared, self.width
            yield f"blk.{i}.attn_output", self.width, query
            yield f"blk.{i}.ffn_gate", self.inner, self.width
            yield f"blk.{i}.ffn_up", self.inner, self.width
            yield f"blk.{i}.ffn_down", self.width, self.inner
        if not self.tied:
            yield "output", self.vocabulary, self.width

    def norms(self) -> Iterator[tuple[str, int]]:
        """The name and size of each norm."""
        yield "output_norm", self.width
        around = ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if self.arch == "gemma3" else ()))
        for i in range(self.layers):
            yield from ((f"blk.{i}.{name}", self.width) for name in around)
            if self.normed_heads:
                yield from ((f"blk.{i}.{name}", self.head_size) for name in ("attn_q_norm", "attn_k_norm"))

    @property
    def multiplied(self) -> int:
        """The weights that a token is multiplied by: all but those of an embedding that is not the unembedding."""
        whole = sum(outputs * inputs for _, outputs, inputs in self.matrices())
        return whole if self.tied else whole - self.vocabulary * self.width


def _llama(width: int, layers: int, heads: tuple[int, int, int], inner: int, vocabulary: int, **more: Any) -> Shape:
    sizes = dict(zip(("heads", "kv_heads", "head_size"), heads, strict=True))
    return Shape(width=width, layers=layers, inner=inner, vocabulary=vocabulary, **sizes, **{"arch": "llama"} | more)


QWEN = {"arch": "qwen3", "base": 1e6, "normed_heads": True}
SHAPES = {
    "llama-1.1b": _llama(2048, 22, (32, 4, 64), 5632, 49152, base=1e4, tied=False),
    "llama-3.2-1b": _llama(2048, 16, (32, 8, 64), 8192, 128256, base=5e5),
    "llama-3.2-3b": _llama(3072, 28, (24, 8, 128), 8192, 128256, base=5e5),
    "qwen3-0.6b": _llama(1024, 28, (16, 8, 128), 3072, 151936, **QWEN),
    "qwen3-1.7b": _llama(2048, 28, (16, 8, 128), 6144, 151936, **QWEN),
    "gemma-3-1b": _llama(
        1152,
        26,
        (4, 1, 256),
        6912,
        262144,
        arch="gemma3",
        base=1e6,
        normed_heads=True,
        keys={"attention.sliding_window": 512},
    ),
    "smollm2-1.7b": _llama(2048, 24, (32, 32, 64), 8192, 49152, base=1.3e5),
}
"""The sizes of these models as published; the first is TinyLlama's with another vocabulary."""
FILE_TYPES = {"Q4_0": 2, "Q8_0": 7, "Q4_K_M": 15, "BF16": 32}
"""The file types, with their numbers in `general.file_type`."""


def _more_bits(name: str, layers: int) -> bool:
    """Whether llama.cpp stores a matrix of a Q4_K_M file in Q6_K: the unembedding, and half of the values and downs."""
    if name in ("token_embd", "output"):
        return True
    _, index, kind = name.split(".")
    i = int(index)
    early_or_late = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
    return kind in ("attn_v", "ffn_down") and early_or_late


def _kind_of(name: str, inputs: int, shape: Shape, file_type: str) -> GGMLQuantizationType:
    if file_type != "Q4_K_M":
        return GGMLQuantizationType[file_type]
    if inputs % 256:
        return GGMLQuantizationType.Q8_0 if _more_bits(name, shape.layers) else GGMLQuantizationType.Q4_1
    return GGMLQuantizationType.Q6_K if _more_bits(name, shape.layers) else GGMLQuantizationType.Q4_K


def _stored(name: str, outputs: int, inputs: int, kind: GGMLQuantizationType) -> Any:
    """Random rows of a matrix in the type `kind`; the rows of a large matrix repeat."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    some = min(outputs, ROWS_AT_ONCE)
    rows = random.standard_normal((some, inputs), dtype=np.float32) * np.float32(DEVIATION)
    bits = {GGMLQuantizationType.Q4_K: 4, GGMLQuantizationType.Q6_K: 6}.get(kind)
    packed = quantize(rows, kind) if bits is None else quantize_k(rows, bits)
    return np.concatenate([packed] * -(-outputs // some))[:outputs]


def _header(writer: GGUFWriter, shape: Shape, file_type: str, tokenizer: Tokenizer) -> None:
    arch = shape.arch
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_quantization_version(2)
    writer.add_context_length(16384)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.base)
    writer.add_vocab_size(shape.vocabulary)
    if arch == "llama":
        writer.add_rope_dimension_count(shape.head_size)
    for key, value in shape.keys.items():
        writer.add_uint32(f"{arch}.{key}", value)
    for key, value in vocabulary_keys(tokenizer, shape.vocabulary).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))


def file_of(name: str, file_type: str, folder: Path, tokenizer: Path) -> Path:
    """The file of a shape in `folder`, written unless it is there; `tokenizer` is a folder with a tokenizer.json."""
    target = folder / f"{name}-{file_type}.gguf"
    if target.exists():
        return target
    shape, partial = SHAPES[name], target.with_suffix(".partial")
    folder.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(partial, shape.arch, use_temp_file=False)
    _header(writer, shape, file_type, Tokenizer.from_folder(tokenizer))
    for matrix, outputs, inputs in shape.matrices():
        kind = _kind_of(matrix, inputs, shape, file_type)
        writer.add_tensor(f"{matrix}.weight", _stored(matrix, outputs, inputs, kind), raw_dtype=kind)
    for norm, size in shape.norms():
        writer.add_tensor(f"{norm}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
