"""Tiny GGUF files of DeepSeek, gpt-oss and Mamba-2, as llama.cpp's converter writes them, give transformers' logits."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import AttnError, CheckpointInvalid
from attn_models.loading import load_model
from attn_models.sources import convert
from attn_models.weights.gguf_joined import JOINED_FAMILIES
from attn_testing.families import FAMILIES
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers")

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
DEEPSEEK_YARN = YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.707, "mscale_all_dim": 0.707}
OSS_YARN = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
MXFP4 = gguf.GGMLQuantizationType.MXFP4
CASES = {
    "deepseek2, v2": ("deepseek_v2", {}),
    "deepseek2, v2 with groups": (
        "deepseek_v2",
        {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek2, v2 whole": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek2, v2 dense": ("deepseek_v2", {"first_k_dense_replace": 2}),
    "deepseek2, v2 stretched": ("deepseek_v2", {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek2, v3": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": OSS_YARN}),
    "gpt-oss, mxfp4": ("gpt_oss", {"rope_parameters": OSS_YARN, "hidden_size": 64, "intermediate_size": 96}),
    "mamba2": ("mamba2", {"n_groups": 1}),
}
QUICK = ("deepseek2, v3", "deepseek2, v2 whole", "gpt-oss, mxfp4", "mamba2")


def model_of(case, tokens):
    """A random model of transformers with so many tokens."""
    family, fields = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **FAMILIES[family][""] | {"vocab_size": tokens} | NO_TOKENS | fields
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
    return model


def of_states(config):
    """The metadata of a Mamba-2."""
    inner = config.expand * config.hidden_size
    sizes = {"conv_kernel": config.conv_kernel, "inner_size": inner, "state_size": config.state_size}
    sizes |= {"time_step_rank": inner // config.head_dim, "group_count": config.n_groups}
    said = {"context_length": 2**20, "feed_forward_length": 0, "attention.head_count": 0}
    said |= {"attention.layer_norm_rms_epsilon": config.layer_norm_epsilon}
    return said | {f"ssm.{key}": value for key, value in sizes.items()}


def of_windows(config):
    """The metadata of a gpt-oss, beside that of any attention."""
    said = {"attention.head_count_kv": config.num_key_value_heads, "expert_count": config.num_local_experts}
    said |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    said |= {"attention.sliding_window": config.sliding_window}
    return said | {"expert_feed_forward_length": config.intermediate_size}


def of_latents(config, whole):
    """The metadata of a DeepSeek, beside that of any attention."""
    turned, latent, apart = config.qk_rope_head_dim, config.kv_lora_rank, "" if whole else "_mla"
    said = {"attention.key_length": latent + turned, "attention.value_length": latent, "attention.head_count_kv": 1}
    if whole:
        said["attention.head_count_kv"] = config.num_attention_heads
    said |= {f"attention.key_length{apart}": config.qk_nope_head_dim + turned}
    said |= {f"attention.value_length{apart}": config.v_head_dim}
    said |= {"attention.kv_lora_rank": latent, "attention.q_lora_rank": config.q_lora_rank}
    said |= {"rope.dimension_count": turned, "leading_dense_block_count": config.first_k_dense_replace}
    said |= {"expert_feed_forward_length": config.moe_intermediate_size, "expert_count": config.n_routed_experts}
    said |= {"expert_shared_count": config.n_shared_experts, "expert_weights_scale": config.routed_scaling_factor}
    said |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.model_type == "deepseek_v3":
        said |= {"expert_weights_norm": True, "expert_gating_func": 2}
    weight = config.rope_parameters.get("mscale_all_dim")
    return said | {"rope.scaling.yarn_log_multiplier": 0.1 * weight if weight else None}


def described(model, whole):
    """The metadata of a model: keys without the architecture's name, as the converter chooses them; None for none."""
    config = model.config
    said = {"block_count": config.num_hidden_layers, "embedding_length": config.hidden_size}
    said |= {"vocab_size": config.vocab_size}
    if config.model_type == "mamba2":
        return said | of_states(config)
    rope = config.rope_parameters
    said |= {"context_length": config.max_position_embeddings, "feed_forward_length": config.intermediate_size}
    said |= {"attention.head_count": config.num_attention_heads, "expert_used_count": config.num_experts_per_tok}
    said |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"])}
    if rope["rope_type"] == "yarn":
        said |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        said |= {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
        said |= {f"rope.scaling.yarn_{key}": rope[key] for key in ("beta_fast", "beta_slow")}
    return said | (of_windows(config) if config.model_type == "gpt_oss" else of_latents(config, whole))


PLACES = {
    "mlp.gate.e_score_correction_bias": ("exp_probs_b.bias", lambda tensor, _: tensor),
    "mlp.experts.down_proj": ("ffn_down_exps.weight", lambda tensor, _: tensor.transpose(1, 2)),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias", lambda tensor, _: tensor),
    "self_attn.sinks": ("attn_sinks.weight", lambda tensor, _: tensor),
    "mixer.A_log": ("ssm_a", lambda tensor, _: -tensor.exp()[:, None]),
    "mixer.D": ("ssm_d", lambda tensor, _: tensor[:, None]),
    "mixer.dt_bias": ("ssm_dt.bias", lambda tensor, _: tensor),
    "mixer.norm.weight": ("ssm_norm.weight", lambda tensor, config: tensor.unflatten(0, (config.n_groups, -1))),
    "mixer.conv1d.weight": ("ssm_conv1d.weight", lambda tensor, _: tensor.squeeze(1)),
}


def divided(rest, tensor, config, whole):
    """The pieces of a tensor that a file keeps in several, or none."""
    if rest == "self_attn.kv_b_proj.weight" and not whole:
        heads = tensor.unflatten(0, (config.num_attention_heads, -1))
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
    if "gate_up_proj" not in rest:
        return {}
    leaf = "bias" if rest.endswith("_bias") else "weight"
    lying = tensor if leaf == "bias" else tensor.transpose(1, 2)
    return {f"ffn_gate_exps.{leaf}": lying[:, ::2], f"ffn_up_exps.{leaf}": lying[:, 1::2]}


def kept(model, tensors, whole):
    """Tensors by their names in a file, in the forms in which it keeps them."""
    config = model.config
    kind = {"gpt_oss": "GPT_OSS", "mamba2": "MAMBA2"}.get(config.model_type, "DEEPSEEK2")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], config.num_hidden_layers)
    stacks = {}
    for name, tensor in tensors.items():
        found = re.search(r"layers\.(\d+)\.(.*)", name)
        block, rest = (f"blk.{found[1]}.", found[2]) if found else ("", name)
        expert = re.search(r"experts\.\d+\.(\w+)_proj", rest)
        pieces = divided(rest, tensor, config, whole)
        if expert:
            stacks.setdefault(f"{block}ffn_{expert[1]}_exps.weight", []).append(tensor)
        elif pieces:
            yield from ((block + place, piece) for place, piece in pieces.items())
        elif rest in PLACES:
            yield block + PLACES[rest][0], PLACES[rest][1](tensor, config)
        else:
            yield names.get_name(name, (".weight", ".bias")), tensor
    for name, parts in stacks.items():
        yield name, torch.stack(parts)


def write(path, model, tiny, tmp_path, *, whole=False, packed=False, **changed):
    """The file of a model; `packed` ones have experts in MXFP4, whose numbers the model is given."""
    family = model.config.model_type
    name = {"gpt_oss": "gpt-oss", "mamba2": "mamba2"}.get(family, "deepseek2")
    model.save_pretrained(tmp_path / "theirs")
    writer = gguf.GGUFWriter(path, name)
    for key, value in (described(model, whole) | changed).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            kinds[type(value)](f"{name}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tiny.tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tiny.tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "1 2", "Ġ Ġ"])
    for theirs, tensor in kept(model, load_file(tmp_path / "theirs/model.safetensors"), whole):
        values = np.ascontiguousarray(tensor.numpy())
        if packed and theirs.endswith("exps.weight"):
            writer.add_tensor(theirs, gguf.quants.quantize(values, MXFP4), raw_dtype=MXFP4)
        else:
            writer.add_tensor(theirs, values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


@torch.no_grad()
def round_experts(model):
    """Experts of a gpt-oss with the numbers that MXFP4 has for them, along what they are multiplied by."""
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            rows = np.ascontiguousarray(weight.transpose(1, 2).numpy())
            rounded = gguf.quants.dequantize(gguf.quants.quantize(rows, MXFP4), MXFP4)
            weight.copy_(torch.from_numpy(rounded).transpose(1, 2))


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.oracle) for case in CASES]
)
@torch.no_grad()
def test_a_converted_file_gives_the_logits_of_transformers(case, tiny_llama, tmp_path):
    model, packed = model_of(case, len(tiny_llama.tokens)), case.endswith("mxfp4")
    if packed:
        round_experts(model)
    tokens = torch.randint(len(tiny_llama.tokens), (2, 30), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    # Older files of DeepSeek keep what latents are expanded to in one piece.
    for whole in (False, True) if case == "deepseek2, v2 whole" else (False,):
        path = write(tmp_path / f"{whole}.gguf", model, tiny_llama, tmp_path, whole=whole, packed=packed)
        loaded = load_model(convert(path, tmp_path / f"ours {whole}", "float32"))
        assert loaded.config.num_layers == model.config.num_hidden_layers
        torch.testing.assert_close(loaded.model(tokens), expected, rtol=1e-5, atol=3e-5)


REFUSED = {
    "deepseek2, v3": [
        ({"expert_gating_func": 3}, "expert_gating_func"),
        ({"expert_weights_norm": False}, "expert_weights_norm"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"attention.scale": 0.3}, "attention.scale"),
        ({"rope.dimension_count": 40}, "key_length_mla"),
        ({"attention.kv_lora_rank": 11}, "tensor 'blk.0.attn_kv_a_mqa.weight' has shape"),
    ],
    "gpt-oss": [
        ({"expert_feed_forward_length": 40}, "expert_feed_forward_length"),
        ({"expert_weights_scale": 2.0}, "expert_weights_scale"),
        ({"rope.scaling.yarn_attn_factor": 0.5}, "yarn_attn_factor"),
    ],
    "mamba2": [({"ssm.group_count": 2}, "group_count"), ({"ssm.dt_b_c_rms": True}, "dt_b_c_rms")],
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_key_that_would_change_what_is_computed_is_refused_by_name(case, tiny_llama, tmp_path):
    model = model_of(case, len(tiny_llama.tokens))
    for place, (changed, said) in enumerate(REFUSED[case]):
        path = write(tmp_path / f"{place}.gguf", model, tiny_llama, tmp_path, **changed)
        with pytest.raises(AttnError, match=re.escape(said)):
            convert(path, tmp_path / str(place), "float32")


def test_groups_that_an_older_file_of_a_known_model_does_not_say_are_refused(tiny_llama, tmp_path):
    model = model_of("deepseek2, v3", len(tiny_llama.tokens))
    unsaid = {"expert_group_count": None, "expert_group_used_count": None}
    path = write(tmp_path / "old.gguf", model, tiny_llama, tmp_path, **unsaid, expert_count=256)
    with pytest.raises(AttnError, match=r"expert_group_count is 'missing'"):
        convert(path, tmp_path / "old", "float32")


def test_a_decay_that_is_no_decay_is_refused(tiny_llama, tmp_path, monkeypatch):
    model = model_of("mamba2", len(tiny_llama.tokens))
    plain = kept

    def grown(*given):
        return ((name, -tensor if name == "blk.1.ssm_a" else tensor) for name, tensor in plain(*given))

    monkeypatch.setitem(write.__globals__, "kept", grown)
    path = write(tmp_path / "grows.gguf", model, tiny_llama, tmp_path)
    with pytest.raises(CheckpointInvalid, match=r"'blk\.1\.ssm_a' contains a decay"):
        convert(path, tmp_path / "grows", "float32")


def test_every_architecture_of_pieces_is_compared():
    assert {case.split(",")[0] for case in CASES} == {family.name for family in JOINED_FAMILIES}
