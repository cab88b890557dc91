"""Tiny GGUF files of hybrids, with tensors as llama.cpp's converters arrange them, give the logits of transformers."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from attn_core import installed
from attn_models.adapters.state_dict import stored_shapes
from attn_models.loading import load_model
from attn_models.sources import convert
from attn_models.tokenizers.vocabulary import byte_of_character
from attn_testing.families import NARROW
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")

TOKENS = ["<s>", *byte_of_character(), "he"]
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
CASES = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen3next": ("qwen3_next", DELTA | EXPERTS),
    "qwen35": ("qwen3_5_text", DELTA),
    "qwen35moe": ("qwen3_5_moe_text", DELTA | EXPERTS),
}
RENAMED = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "norm.weight": "ssm_norm.weight"}
PROJECTED = {"in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta"}
RENAMED |= {f"{theirs}.weight": f"{name}.weight" for theirs, name in PROJECTED.items()}
RENAMED |= {"conv1d.weight": "ssm_conv1d.weight", "out_proj.weight": "ssm_out.weight"}


def heads_apart(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The first of three heads of both groups, then the second ones, then the third ones, by their indices."""
    order = [group * 3 + head for head in range(3) for group in range(2)]
    return torch.cat([tensor[head * size : (head + 1) * size] for head in order])


def rearranged(leaf: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of Gated DeltaNet in a file."""
    if leaf == "norm.weight":
        return tensor
    if leaf == "A_log":
        return -heads_apart(tensor, 1).exp()
    if leaf in ("in_proj_qkv.weight", "conv1d.weight"):
        rows = tensor.reshape(len(tensor), -1)
        return torch.cat([rows[:32], heads_apart(rows[32:], 4)])
    if leaf == "out_proj.weight":
        return heads_apart(tensor.T, 4).T
    return heads_apart(tensor, 4 if leaf == "in_proj_z.weight" else 1)


def stored(model, names):
    """The names and tensors of a file."""
    for theirs, tensor in model.state_dict().items():
        _, delta, leaf = theirs.partition(".linear_attn.")
        layer = theirs.split(".")[2] if ".layers." in theirs else ""
        if leaf == "in_proj_qkvz.weight":
            parts = [part.flatten(0, 1) for part in tensor.unflatten(0, (2, -1)).split([8, 8, 12, 12], 1)]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat(parts[:3])
            yield f"blk.{layer}.attn_gate.weight", parts[3]
        elif leaf == "in_proj_ba.weight":
            yield f"blk.{layer}.ssm_ba.weight", tensor
        elif delta and model.config.model_type == "qwen3_next":
            kept = -tensor.exp() if leaf == "A_log" else tensor
            yield f"blk.{layer}.{RENAMED[leaf]}", kept[:, 0] if leaf == "conv1d.weight" else kept
        elif delta:
            yield f"blk.{layer}.{RENAMED[leaf]}", rearranged(leaf, tensor)
        elif theirs.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
        elif theirs.endswith("experts.down_proj"):
            yield f"blk.{layer}.ffn_down_exps.weight", tensor
        elif "lm_head" not in theirs or not model.config.tie_word_embeddings:
            centred = theirs.endswith("norm.weight") and model.config.model_type != "lfm2"
            filters = theirs.endswith("conv.conv.weight")
            yield names.get_name(theirs, (".weight",)), tensor[:, 0] if filters else tensor + 1 if centred else tensor


def write(path, name: str, model) -> None:
    config, writer = model.config, gguf.GGUFWriter(path, name)
    kinds = config.layer_types
    drafts = int(name == "qwen35")  # of what converters add since 2026, one tensor stands for all
    writer.add_block_count(config.num_hidden_layers + drafts)
    writer.add_nextn_predict_layers(drafts)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(48)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in kinds] if name == "lfm2" else 2)
    writer.add_layer_norm_rms_eps(config.norm_eps if name == "lfm2" else config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if name == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_key_length(16)
        writer.add_value_length(16)
        writer.add_rope_dimension_count(4)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(8)
        writer.add_ssm_group_count(2)
        writer.add_ssm_time_step_rank(6)
        writer.add_ssm_inner_size(24)
        writer.add_array(
            f"{name}.attention.recurrent_layers", [kind == "linear_attention" for kind in kinds] + [False] * drafts
        )
    if drafts:
        writer.add_tensor("blk.2.nextn.enorm.weight", np.ones(32, np.float32))
    if name in ("qwen35moe", "qwen3next"):
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e"])
    names = gguf.get_tensor_name_map(
        next(kind for kind in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[kind] == name), config.num_hidden_layers
    )
    for found, tensor in stored(model, names):
        writer.add_tensor(found, np.ascontiguousarray(tensor.numpy()))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


@pytest.mark.parametrize("name", ["lfm2", "qwen3next", "qwen35", pytest.param("qwen35moe", marks=pytest.mark.oracle)])
def test_a_file_gives_the_logits_of_transformers(name, tmp_path):
    family, fields = CASES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **NARROW | fields | {"vocab_size": len(TOKENS)})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        write(tmp_path / "tiny.gguf", name, model)
        ours = load_model(convert(tmp_path / "tiny.gguf", tmp_path / "ours", "float32")).model
        tokens = torch.randint(len(TOKENS), (2, 17))
        torch.testing.assert_close(ours(tokens), model(tokens).logits, rtol=1e-5, atol=5e-5)


RWKV7 = {
    "model_type": "rwkv7",
    "architectures": ["RWKV7ForCausalLM"],
    "vocab_size": len(TOKENS),
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "num_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    **{f"{name}_low_rank_dim": rank for name, rank in {"decay": 32, "a": 16, "gate": 48, "v": 8}.items()},
}
# What llama.cpp's converter renames before it looks a name up.
SPELLED = {"attn": "attention", "ffn_norm": "ln2", "g_norm": "ln_x", "ffn": "feed_forward"}
SPELLED |= {"_lora.lora.0.weight": "1.weight", "_lora.lora.2.weight": "2.weight", "_lora.lora.2.bias": "0.weight"}


def as_converted(tensors: dict[str, torch.Tensor]):
    """The names and tensors of RWKV-7 in a file; its first layer has a copy of the rates as its value mix."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, 2)
    for theirs, tensor in tensors.items():
        name = theirs
        for one, other in SPELLED.items():
            name = name.replace(one, other)
        layer, _, mix = name.partition(".attention.x_")
        if mix == "r":
            mixes = [tensors[f"{theirs[:-1]}{letter}"] for letter in "rwkvag"]
            yield f"blk.{layer.rpartition('.')[2]}.time_mix_lerp_fused.weight", torch.stack(mixes)
        if mix:
            continue
        found = names.get_name(name, (".weight", ".bias"))
        found += "" if found.endswith(("weight", "bias")) else ".weight"
        kept = tensor.flatten() if name.endswith("r_k") else tensor.squeeze()
        yield found, kept
        if found.startswith("blk.0.time_mix_a"):
            yield found.replace("mix_a", "mix_v"), kept


def test_a_file_of_rwkv7_gives_the_logits_of_its_folder(tmp_path) -> None:
    adapter = installed().adapters.get("rwkv7")
    config = adapter.from_hf_config(RWKV7)
    shapes = {name: tuple(tensor.shape) for name, tensor in adapter.build(config).state_dict().items()}
    torch.manual_seed(0)
    tensors = {
        name: torch.rand(shape) if ".x_" in name else 0.2 * torch.randn(shape) + float("norm.weight" in name)
        for name, (shape, _) in stored_shapes(adapter.layout(config), shapes).items()
    }
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(RWKV7))
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_context_length(64)
    writer.add_embedding_length(128)
    writer.add_block_count(2)
    writer.add_layer_norm_eps(1e-5)
    writer.add_wkv_head_size(64)
    writer.add_decay_lora_rank(32)
    writer.add_iclr_lora_rank(16)
    writer.add_value_residual_mix_lora_rank(8)
    writer.add_gate_lora_rank(48)
    writer.add_feed_forward_length(256)
    writer.add_head_count(0)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["<s>", *(repr(bytes([byte]))[2:-1] for byte in range(256)), "he"])
    writer.add_token_types([3] + [1] * 257)
    for name, tensor in as_converted(tensors):
        writer.add_tensor(name, np.ascontiguousarray(tensor.numpy()))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    theirs, tokens = load_model(tmp_path / "theirs"), torch.randint(len(TOKENS), (2, 19))
    for dtype in ("float32", "stored"):
        ours = load_model(convert(tmp_path / "m.gguf", tmp_path / dtype, dtype))
        with torch.no_grad():
            torch.testing.assert_close(ours.model(tokens), theirs.model(tokens), rtol=0, atol=1e-6)
    assert ours.tokenizer.encode("hehé") == [257, 105, 196, 170]
