"""A tiny but complete Llama GGUF file, written by the gguf library: a writer independent of our reader."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import pytest

ALPHABET = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "1 2", "Ġ Ġ"]
STORED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
STORED += ["IQ4_NL", "IQ4_XS"]
KINDS = [gguf.GGMLQuantizationType[name] for name in STORED]
SCALES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@dataclass
class TinyLlama:
    """Random weights in Hugging Face's order and names, and the file that holds them in llama.cpp's."""

    path: Path
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    layers: int = 2
    width: int = 64
    heads: int = 4
    key_value_heads: int = 2
    inner: int = 96
    kinds: dict[str, str] = field(default_factory=dict)
    tokens: list[str] = field(
        default_factory=lambda: [*SPECIALS, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    )


def pairs_side_by_side(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp keeps them: row i of a head's first half followed by row i of its second half."""
    per_head = np.split(rows, heads)
    mixed = []
    for head in per_head:
        first, second = np.split(head, 2)
        for a, b in zip(first, second, strict=True):
            mixed += [a, b]
    return np.stack(mixed)


def halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """What `pairs_side_by_side` was given."""
    places = pairs_side_by_side(np.arange(len(rows)), heads)
    return rows[np.argsort(places)]


def pack(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of bytes: of the values, or of any bits and a small scale where the library only reads the format."""
    if kind.name not in SCALES:
        return gguf.quants.quantize(values, kind)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(len(values)).integers(0, 256, (values.size // weights, size), dtype=np.uint8)
    for place in SCALES[kind.name]:
        blocks[:, place : place + 2] = np.array([0.001], np.float16).view(np.uint8)
    return blocks.reshape(len(values), -1)


def describe(writer: gguf.GGUFWriter, tiny: TinyLlama) -> None:
    writer.add_block_count(tiny.layers)
    writer.add_context_length(128)
    writer.add_embedding_length(tiny.width)
    writer.add_feed_forward_length(tiny.inner)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.key_value_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(tiny.width // tiny.heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tiny.tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tiny.tokens) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def build(tiny: TinyLlama, kinds: list[gguf.GGMLQuantizationType], most_tensors: int = 0) -> TinyLlama:
    """Write the file, its matrices in each of the kinds in turn; vectors, and all without kinds, are float32. With
    `most_tensors`, the file is written in parts of so many tensors."""
    random = np.random.default_rng(0)
    head = tiny.width // tiny.heads
    writer = gguf.GGUFWriter(tiny.path, "llama", split_max_tensors=most_tensors)
    describe(writer, tiny)
    turns = itertools.cycle(kinds)

    def add(source: str, target: str, *shape: int, rotary: int = 0) -> None:
        values = random.standard_normal(shape, dtype=np.float32)
        tiny.weights[target] = values
        kept = pairs_side_by_side(values, rotary) if rotary else values
        if len(shape) == 1 or not kinds:
            writer.add_tensor(source, kept)
            return
        kind = next(turns)
        packed = pack(kept, kind)
        plain = gguf.quants.dequantize(packed, kind)
        tiny.weights[target] = halves_apart(plain, rotary) if rotary else plain
        tiny.kinds[target] = kind.name
        writer.add_tensor(source, packed, raw_dtype=kind)

    add("token_embd.weight", "model.embed_tokens.weight", len(tiny.tokens), tiny.width)
    add("output_norm.weight", "model.norm.weight", tiny.width)
    for n in range(tiny.layers):
        keys = tiny.key_value_heads * head
        add(f"blk.{n}.attn_norm.weight", f"model.layers.{n}.input_layernorm.weight", tiny.width)
        to = f"model.layers.{n}.self_attn"
        add(f"blk.{n}.attn_q.weight", f"{to}.q_proj.weight", tiny.width, tiny.width, rotary=tiny.heads)
        add(f"blk.{n}.attn_k.weight", f"{to}.k_proj.weight", keys, tiny.width, rotary=tiny.key_value_heads)
        add(f"blk.{n}.attn_v.weight", f"{to}.v_proj.weight", keys, tiny.width)
        add(f"blk.{n}.attn_output.weight", f"{to}.o_proj.weight", tiny.width, tiny.width)
        add(f"blk.{n}.ffn_norm.weight", f"model.layers.{n}.post_attention_layernorm.weight", tiny.width)
        for part, name in (("gate", "gate_proj"), ("up", "up_proj")):
            add(f"blk.{n}.ffn_{part}.weight", f"model.layers.{n}.mlp.{name}.weight", tiny.inner, tiny.width)
        add(f"blk.{n}.ffn_down.weight", f"model.layers.{n}.mlp.down_proj.weight", tiny.width, tiny.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """The tiny model with float32 tensors: its weights come back exactly."""
    return build(TinyLlama(tmp_path_factory.mktemp("tiny") / "tiny.gguf"), [])


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The tiny model in three parts."""
    (tmp_path / "parts").mkdir()
    build(TinyLlama(tmp_path / "parts" / "tiny.gguf"), [], most_tensors=8)
    return sorted((tmp_path / "parts").iterdir())


@pytest.fixture(scope="session")
def quantised_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    """A wider one with matrices of every kind, named in `kinds`; `weights` are as dequantised by the library."""
    path = tmp_path_factory.mktemp("tiny") / "quantised.gguf"
    return build(TinyLlama(path, width=256, inner=256), KINDS)
