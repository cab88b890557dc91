"""GGUF import: the weights come out in Hugging Face's names and order, bit for bit, from a limited process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, UnknownName
from attn_models.weights import gguf_config, import_gguf_weights, read_gguf_header
from attn_models.weights.gguf_child import REFUSED, half_split_rows, plan_shards, stored
from attn_models.weights.gguf_rope import shortest_float32
from safetensors.torch import load_file


def test_float32_weights_come_back_exactly_under_their_names(tiny_llama, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    import_gguf_weights(
        read_gguf_header(tiny_llama.path), tmp_path, "float32", lambda done, total: steps.append((done, total))
    )
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == set(tiny_llama.weights)
    for name, values in tiny_llama.weights.items():
        assert torch.equal(found[name], torch.from_numpy(values)), name
    assert steps == [(n, len(found)) for n in range(1, len(found) + 1)]


def test_bfloat16_is_torchs_rounding_of_the_float32_weights(tiny_llama, tmp_path: Path) -> None:
    import_gguf_weights(read_gguf_header(tiny_llama.path), tmp_path, "bfloat16")
    found = load_file(tmp_path / "model.safetensors")
    for name, values in tiny_llama.weights.items():
        assert torch.equal(found[name], torch.from_numpy(values).to(torch.bfloat16)), name


def test_a_file_of_all_formats_comes_back_as_the_library_dequantises_them(quantised_llama, tmp_path: Path) -> None:
    import_gguf_weights(read_gguf_header(quantised_llama.path), tmp_path, "float32")
    found = load_file(tmp_path / "model.safetensors")
    assert {"Q8_0", "Q2_K", "Q3_K", "Q4_K", "IQ4_NL", "IQ4_XS"} < set(quantised_llama.kinds.values())
    assert set(found) == set(quantised_llama.weights)
    for name, values in quantised_llama.weights.items():
        assert torch.equal(found[name], torch.from_numpy(values)), (name, quantised_llama.kinds.get(name, "F32"))


def test_bfloat16_rounding_agrees_with_torch_on_every_kind_of_number() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    ties = (np.arange(2048, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for sample in (values, ties, np.array([0.0, -0.0, 1e-45, 3.4e38], np.float32)):
        ours = torch.from_numpy(stored(sample, "bfloat16").view(np.int16)).view(torch.bfloat16)
        assert torch.equal(ours.view(torch.int16), torch.from_numpy(sample.copy()).bfloat16().view(torch.int16))


def test_reordered_rows_give_the_same_attention_scores_under_the_other_rotary_form() -> None:
    heads, head, width, length = 2, 8, 16, 5
    random = np.random.default_rng(2)
    query, key = (random.standard_normal((heads * head, width)) for _ in range(2))
    inputs = random.standard_normal((length, width))
    angle = np.arange(length)[:, None] / 10000 ** (np.arange(head // 2) / (head // 2))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def side_by_side(rows: np.ndarray) -> np.ndarray:
        x = (inputs @ rows.T).reshape(length, heads, head // 2, 2)
        turned = (x[..., 0] * cos - x[..., 1] * sin, x[..., 0] * sin + x[..., 1] * cos)
        return np.stack(turned, -1).reshape(length, heads, head)

    def half_apart(rows: np.ndarray) -> np.ndarray:
        x = (inputs @ rows.T).reshape(length, heads, 2, head // 2)
        return np.concatenate((x[:, :, 0] * cos - x[:, :, 1] * sin, x[:, :, 0] * sin + x[:, :, 1] * cos), -1)

    theirs = np.einsum("qhd,khd->hqk", side_by_side(query), side_by_side(key))
    ours = np.einsum("qhd,khd->hqk", half_apart(half_split_rows(query, heads)), half_apart(half_split_rows(key, heads)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert not np.allclose(np.einsum("qhd,khd->hqk", half_apart(query), half_apart(key)), theirs)


def test_the_configuration_says_what_the_file_says(tiny_llama) -> None:
    config = gguf_config(read_gguf_header(tiny_llama.path), "float32")
    assert config["model_type"] == "llama"
    assert (config["hidden_size"], config["head_dim"], config["num_key_value_heads"]) == (64, 16, 2)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"], config["dtype"]) == (
        1e-5,
        10000.0,
        "float32",
    )
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, None)


def test_the_end_of_a_turn_ends_a_generation_too(tiny_llama, tmp_path) -> None:
    path = rewritten(tiny_llama.path, tmp_path / "turns.gguf", added={"tokenizer.ggml.eot_token_id": 5})
    assert gguf_config(read_gguf_header(path), "float32")["eos_token_id"] == [2, 5]


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 500000.0, 0.1, 1 / 3, 3.4e38])
def test_the_shortest_decimal_is_the_same_float32(value: float) -> None:
    widened = float(np.float32(value))
    assert np.float32(shortest_float32(widened)) == np.float32(value)
    assert len(repr(shortest_float32(widened))) <= len(repr(widened))


def rewritten(source: Path, target: Path, **changes: object) -> Path:
    """The file with some tensors left out or changed and some metadata replaced, by the gguf library."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, changes.get("architecture", "llama"))
    for key, item in reader.fields.items():
        if key.startswith(("GGUF.", "general.architecture")):
            continue
        value = changes.get("metadata", {}).get(key, item.contents())
        sub = item.types[-1] if item.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, item.types[0], sub)
    for key, number in changes.get("added", {}).items():
        writer.add_uint32(key, number)
    for item in reader.tensors:
        values = changes.get("tensors", {}).get(item.name, np.array(item.data))
        if values is not None:
            writer.add_tensor(item.name, values)
    for name, values in changes.get("more", {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"architecture": "mamba"}, UnknownName, "mamba"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, CheckpointInvalid, "ffn_up.weight' is missing"),
        ({"tensors": {"output_norm.weight": np.zeros(32, np.float32)}}, CheckpointInvalid, "output_norm.weight"),
        ({"more": {"extra.weight": np.zeros(32, np.float32)}}, CheckpointInvalid, "extra.weight"),
        ({"more": {"rope_freqs.weight": np.zeros(8, np.float32)}}, CheckpointInvalid, "not above 0"),
        ({"more": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, Incompatible, "Llama 3"),
        ({"added": {"llama.expert_count": 8}}, CheckpointInvalid, "ffn_down_exps"),
        ({"added": {"llama.attention.sliding_window": 4}}, Incompatible, r"llama\.attention\.sliding_window = 4"),
        ({"added": {"llama.rope.scale_linear": 4}}, Incompatible, "scale_linear"),
        ({"added": {"llama.attention.causal": 0}}, Incompatible, "causal"),
        ({"added": {"llama.attention.scale": 2}}, Incompatible, "attention.scale = 2 cannot"),
        ({"added": {"llama.logit_scale": 2}}, Incompatible, "logit_scale"),
        ({"added": {"llama.attn_logit_softcapping": 30}}, Incompatible, "attn_logit_softcapping"),
        ({"added": {"llama.attention.clamp_kqv": 8}}, Incompatible, "clamp_kqv"),
        ({"added": {"llama.unheard_of": 1}}, Incompatible, "unheard_of = 1 cannot be imported; the key is unknown"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, Incompatible, "partial_rotary_factor"),
        ({"metadata": {"llama.block_count": 4_000_000_000}}, CheckpointInvalid, "layers"),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, CheckpointInvalid, "heads"),
        ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, CheckpointInvalid, "epsilon"),
    ],
)
def test_a_file_that_is_no_llama_is_refused_by_what_is_wrong(tiny_llama, tmp_path, changes, error, says) -> None:
    header = read_gguf_header(rewritten(tiny_llama.path, tmp_path / "other.gguf", **changes))
    with pytest.raises(error, match=says):
        import_gguf_weights(header, tmp_path, "bfloat16")


def test_factors_of_rotary_frequencies_are_llama_3s_scaling(tiny_llama, tmp_path: Path) -> None:
    """transformers computes the frequencies whose ratios llama.cpp's converter stores."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {**scaling, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=1 << 17)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (500000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled).numpy().astype(np.float32)
    assert 1 < sorted(factors)[-2] <= 32
    path = rewritten(
        tiny_llama.path,
        tmp_path / "llama3.gguf",
        metadata={"llama.rope.freq_base": 500000.0},
        more={"rope_freqs.weight": factors},
    )
    header = read_gguf_header(path)
    assert gguf_config(header, "float32")["rope_parameters"] == rope
    import_gguf_weights(header, tmp_path, "float32")
    assert "rope_freqs.weight" not in load_file(tmp_path / "model.safetensors")


def test_a_weight_that_is_nan_is_refused_with_the_tensors_name(tiny_llama, tmp_path: Path) -> None:
    broken = np.ones(64, np.float32)
    broken[7] = np.nan
    path = rewritten(tiny_llama.path, tmp_path / "nan.gguf", tensors={"output_norm.weight": broken})
    with pytest.raises(CheckpointInvalid, match=r"output_norm\.weight"):
        import_gguf_weights(read_gguf_header(path), tmp_path, "bfloat16")


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attn_models.weights.gguf_child", *arguments]
    return subprocess.run(command, input="{}", capture_output=True, text=True, check=False)


def test_the_child_refuses_a_hostile_file_by_its_own_reading(tmp_path: Path) -> None:
    (tmp_path / "hostile.gguf").write_bytes(b"GGUF" + b"\xff" * 111)
    result = child(str(tmp_path / "hostile.gguf"), str(tmp_path), "bfloat16", str(2 << 30))
    assert result.returncode == REFUSED
    assert "hostile.gguf" in json.loads(result.stdout)["refused"]


def test_the_child_cannot_take_more_memory_than_it_is_given(tiny_llama, tmp_path: Path) -> None:
    result = child(str(tiny_llama.path), str(tmp_path), "float32", str(64 << 20))
    assert result.returncode not in (0, REFUSED)


def test_neither_weights_nor_tokenizers_nor_sources_import_torch() -> None:
    code = (
        "import sys, attn_models.weights, attn_models.tokenizers, attn_models.sources; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_shards_hold_every_tensor_once_in_order_and_within_the_limit() -> None:
    sizes = {f"t{n}": size for n, size in enumerate([4, 4, 4, 20, 1, 9, 1])}
    plan = plan_shards(sizes, limit=10)
    assert [name for names in plan.files.values() for name in names] == list(sizes)
    assert all(len(names) == 1 or sum(sizes[n] for n in names) <= 10 for names in plan.files.values())
    assert next(iter(plan.files)) == f"model-00001-of-{len(plan.files):05}.safetensors"
    assert plan.total_bytes == sum(sizes.values())
