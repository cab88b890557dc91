"""A GGUF file is run in this process, and found by a server, as the folder that `attn convert` writes of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from attn_core.errors import InvalidValue
from attn_engine import LocalClient
from attn_models.sources import convert
from attn_schema import EngineConfig, SamplingParams
from attn_serve.sources import ModelSources, find_folder

LETTERS = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
WIDTH, HEADS, INNER = 64, 4, 96


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Llama of one layer, its matrices in Q4_0 blocks, that spells byte by byte."""
    path, random = tmp_path / "tiny.gguf", np.random.default_rng(5)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens := ["<|end|>", *LETTERS, "be"])
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["b e"])
    writer.add_eos_token_id(0)
    square = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (WIDTH, WIDTH))
    shapes = square | {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    matrices = {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in ({"token_embd.weight": (len(tokens), WIDTH)} | matrices).items():
        blocks = gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q4_0)
        writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_answers_as_its_folder_does_and_is_read_once(file: Path, tmp_path: Path) -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    folder = convert(file, tmp_path / "folder")
    with LocalClient(tmp_path / "home", EngineConfig(num_threads=1)) as client:
        tokens = [client.complete(str(model), "to be or", sampling).tokens for model in (folder, file)]
        assert tokens[0] == tokens[1]
        file.unlink()
        assert client.complete(str(file), "to be or", sampling).tokens == tokens[0]


async def test_a_server_finds_a_file_for_an_admin_alone(file: Path, tmp_path: Path) -> None:
    sources = ModelSources(tmp_path / "home")
    found = await sources.find(str(file))
    assert (found / "config.json").is_file()
    assert found == find_folder(str(file), tmp_path / "home")
    with pytest.raises(InvalidValue, match="paths are for admins"):
        await sources.find(str(file), "somebody")
