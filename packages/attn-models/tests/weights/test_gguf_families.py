"""Tiny GGUF files of described families, as llama.cpp's converters write them, give the logits of transformers."""

from __future__ import annotations

import re

import gguf
import numpy as np
import pytest
import torch
from attn_core.errors import AttnError, CheckpointInvalid
from attn_models import commands
from attn_models.loading import load_model
from attn_models.lora import AdaptedModel, read_adapter
from attn_models.sources import convert
from attn_models.weights.gguf_table import GGUF_FAMILIES
from attn_testing.families import FAMILIES, LONG_ROPE
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

SIDE_BY_SIDE = {"granite", "llama", "mixtral", "smollm3"}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 2.0}
SCOUT = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0} | {
    "original_max_position_embeddings": 8192
}
CASES = {
    "qwen2": ("qwen2", {}),
    "qwen2, stretched": ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "granite": ("granite", SCALED),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gptneox": ("gpt_neox", {"use_parallel_residual": True}),
    "gptneox, in turn": ("gpt_neox", {"use_parallel_residual": False}),
    "falcon, one key": ("falcon", {}),
    "falcon, two norms": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt2": ("gpt2", {}),
    "gpt2, with a head": ("gpt2", {"tie_word_embeddings": False, "n_inner": 40}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "command-r": ("cohere", {"attention_bias": False}),
    "cohere2": ("cohere2", {}),
    "glm4": ("glm4", {}),
    "phi3, long": (
        "phi3",
        {
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
            "rope_parameters": LONG_ROPE,
            "original_max_position_embeddings": 32,
        },
    ),
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, experts": ("mixtral", {}),
    "qwen2moe": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "phi2": ("phi", {"num_key_value_heads": 4}),
    "starcoder": ("gpt_bigcode", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "exaone4": ("exaone4", {}),
    "exaone4, no windows": (
        "exaone4",
        {"num_hidden_layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "chatglm": ("glm", {}),
    "llama4": (
        "llama4_text",
        {"floor_scale": 8192, "attn_scale": 0.1, "attention_chunk_size": 8192, "rope_parameters": SCOUT},
    ),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 256}),
    "gemma2": ("gemma2", {"head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 3.0}),
}


QUICK = (
    "qwen2",
    "granite",
    "gptneox",
    "falcon, two norms",
    "qwen3moe",
    "gemma2",
    "gpt2",
    "phi3, long",
    "llama, experts",
    "qwen2moe",
    "starcoder",
    "exaone4",
    "llama4",
)
"""Each way to keep tensors once; the others are compared in the session of oracles."""


@pytest.fixture(params=[case if case in QUICK else pytest.param(case, marks=pytest.mark.oracle) for case in CASES])
def peer(request, tiny_llama):
    """The architecture's name, and a random model of transformers with as many tokens as the tiny tokenizer."""
    return request.param.split(",")[0], random_model(request.param, tiny_llama)


def random_model(case, tiny):
    family, fields = CASES[case]
    torch.manual_seed(0)
    sizes = FAMILIES[family][""] | {"vocab_size": len(tiny.tokens)} | NO_TOKENS | fields
    config = transformers.AutoConfig.for_model(family, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name or "ln_" in name), std=0.2)
    return model


def get(config, *names):
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def falcon_keys(config):
    return config.num_kv_heads if config.new_decoder_architecture else 1


def converted(tensors, config):
    """Tensors as a file keeps them: projections regrouped, pairs side by side, experts stacked."""
    heads = get(config, "num_attention_heads", "n_head", "n_heads")
    for name, tensor in stacked(tensors):
        rest = tensor.shape[1:]
        if re.search(r"[qk]_proj.(weight|bias)", name) and config.model_type in SIDE_BY_SIDE:
            own = heads if "q_proj" in name else config.num_key_value_heads
            yield name, tensor.reshape(own, 2, -1, *rest).swapaxes(1, 2).reshape(tensor.shape)
        elif config.model_type.startswith("gemma") and name.endswith("norm.weight"):
            yield name, tensor + 1
        elif re.search(r"(c_attn|c_proj|c_fc)\.weight", name) and config.model_type == "gpt2":
            yield name, tensor.T
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor.transpose(1, 2)
        elif "query_key_value" in name:
            shared = falcon_keys(config) if config.model_type == "falcon" else heads
            rows = tensor.reshape(shared, heads // shared + 2, -1, *rest)
            yield name, torch.cat([part.flatten(0, 2) for part in (rows[:, :-2], rows[:, -2:-1], rows[:, -1:])])
        else:
            yield name, tensor


def stacked(tensors):
    stacks = {}
    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        stacks.setdefault(f"{expert[1]}.{expert[3]}" if expert else name, []).append(tensor)
    for name, parts in stacks.items():
        yield name, torch.stack(parts) if len(parts) > 1 else parts[0]


def describe(writer, config, tiny):
    heads = get(config, "num_attention_heads", "n_head", "n_heads")
    width = get(config, "hidden_size", "n_embd", "d_model")
    writer.add_block_count(get(config, "num_hidden_layers", "n_layer", "n_layers"))
    writer.add_context_length(get(config, "max_position_embeddings", "max_seq_len") or 2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(
        get(config, "ffn_hidden_size", "intermediate_size_mlp", "intermediate_size", "n_inner") or 4 * width
    )
    writer.add_head_count(heads)
    shared = falcon_keys(config) if config.model_type == "falcon" else get(config, "num_key_value_heads")
    if shared:
        writer.add_head_count_kv(shared)
    size = get(config, "head_dim") or width // heads
    if "head_dim" in config.to_dict():
        writer.add_key_length(size)
        writer.add_value_length(size)
    if get(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(get(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"))
    rope = getattr(config, "rope_parameters", None)
    rope = rope and rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope and config.model_type != "gemma2":
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
        if rope["rope_type"] == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
    describe_own(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tiny.tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tiny.tokens) - 3))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "1 2", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def describe_own(writer, config):
    match config.model_type:
        case "phi3" | "cohere2" | "gemma3_text":
            writer.add_sliding_window(config.sliding_window or 0)
        case "exaone4":
            writer.add_sliding_window(config.sliding_window or 0)
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        case "gpt_neox" | "stablelm":
            writer.add_parallel_residual(config.use_parallel_residual)
        case "gemma2":
            writer.add_sliding_window(config.sliding_window)
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
        case "mpt":
            writer.add_max_alibi_bias(8.0)
        case "granite":
            writer.add_attention_scale(config.attention_multiplier)
            writer.add_embedding_scale(config.embedding_multiplier)
            writer.add_residual_scale(config.residual_multiplier)
            writer.add_logit_scale(config.logits_scaling)
        case "qwen3_moe" | "qwen2_moe" | "olmoe" | "mixtral" | "llama4_text":
            writer.add_expert_count(get(config, "num_experts", "num_local_experts"))
            writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)


def named(name, theirs, layers):
    architecture = next(kind for kind in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[kind] == name)
    names = gguf.get_tensor_name_map(architecture, layers)
    known = (names.get_name(one, (".weight", ".bias")) for one in (theirs, theirs.removeprefix("transformer.")))
    return next(found for found in known if found)


def write(path, name, model, folder, tiny, more=(), **changed):
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = get(model.config, "num_hidden_layers", "n_layer", "n_layers")
    writer = gguf.GGUFWriter(path, name)
    describe(writer, model.config, tiny)
    for key, value in changed.items():
        writer.add_float32(f"{name}.{key.replace('__', '.')}", value)
    for theirs, tensor in converted(tensors, model.config):
        writer.add_tensor(named(name, theirs, layers), np.ascontiguousarray(tensor.numpy()))
    if getattr(model.config, "rope_parameters", {}).get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(model.config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors((1 + np.log(64 / 32) / np.log(32)) ** 0.5)
        for kind in ("long", "short"):
            factors = np.array(model.config.rope_parameters[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if model.config.model_type == "llama4_text":  # of four wavelengths, one is above 8192
        writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1, 16], np.float32))
    for extra in more:
        writer.add_tensor(extra, np.ones(8, np.float32))
    finish(writer)


def finish(writer):
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def test_a_converted_file_gives_the_logits_of_transformers(peer, tiny_llama, tmp_path):
    name, model = peer
    write(tmp_path / "tiny.gguf", name, model, tmp_path / "theirs", tiny_llama)
    loaded = load_model(convert(tmp_path / "tiny.gguf", tmp_path / "ours", "float32"))
    tokens = torch.randint(len(tiny_llama.tokens), (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(tokens), model(tokens).logits, rtol=1e-5, atol=2e-5)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello", add_special=False)) == "hello"


LINEAR = re.compile(r"(proj|dense|query_key_value|dense_\w+|w[123])\.weight$")
RANK = 3


def write_adapter(path, name, config, tensors, alpha, more=()):
    """A file as convert_lora_to_gguf.py writes it, and the tensors with its adapter merged."""
    layers = get(config, "num_hidden_layers", "n_layer", "n_layers")
    embedding = next(key for key in tensors if re.search("embed_(in|tokens)", key))
    changed = {key: tensor for key, tensor in tensors.items() if LINEAR.search(key) or key == embedding}
    downs = {key: torch.randn(RANK, tensor.shape[1]) * 0.3 for key, tensor in changed.items()}
    ups = {key: torch.randn(len(tensor), RANK) * 0.3 for key, tensor in changed.items()}
    writer = gguf.GGUFWriter(path, name)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for leaf, found in (("lora_a", stacked(downs)), ("lora_b", converted(ups, config))):
        for key, tensor in found:
            turned = {"lora_a": ups[key], "lora_b": downs[key].T}[leaf] if key == embedding else tensor
            writer.add_tensor(f"{named(name, key, layers)}.{leaf}", np.ascontiguousarray(turned.numpy()))
    for extra in more:
        writer.add_tensor(extra, np.ones(8, np.float32))
    finish(writer)
    scale = alpha / RANK if alpha else 1.0
    return tensors | {key: tensor + scale * ups[key] @ downs[key] for key, tensor in changed.items()}


ADAPTED = {"llama": 7.0, "qwen3": 0.0, "gptneox": 2.0, "llama, experts": 7.0, "phi3": 7.0, "gemma2": 0.5}


@pytest.mark.parametrize(("case", "alpha"), ADAPTED.items())
def test_an_adapter_in_a_file_computes_what_merged_weights_do(case, alpha, tiny_llama, tmp_path):
    name, model = case.split(",")[0], random_model(case, tiny_llama)
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    merged = write_adapter(tmp_path / "a.gguf", name, model.config, tensors, alpha)
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings, merged["lm_head.weight"] = False, tensors["model.embed_tokens.weight"]
    model.save_pretrained(tmp_path / "merged")
    save_file(merged, tmp_path / "merged" / "model.safetensors", {"format": "pt"})
    theirs = type(model).from_pretrained(tmp_path / "merged", attn_implementation="eager").eval()
    tokens, ours = torch.randint(len(tiny_llama.tokens), (2, 17)), load_model(tmp_path / "base").model
    adapted = AdaptedModel(ours)
    with torch.no_grad(), adapted.using([(read_adapter(tmp_path / "a.gguf", ours, tmp_path / "base"), 0)]):
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=5e-5)
    if "lm_head.weight" not in tensors:  # a change of one of two tied tables cannot be merged
        return
    arguments = ["merge", tmp_path / "a.gguf", tmp_path / "ours", "--base", tmp_path / "base"]
    assert CliRunner().invoke(commands.app, list(map(str, arguments))).exit_code == 0
    with torch.no_grad():
        torch.testing.assert_close(
            load_model(tmp_path / "ours").model(tokens), theirs(tokens).logits, rtol=1e-5, atol=5e-5
        )


REFUSED = {
    "another architecture": ("qwen3", {}, "'qwen3' for a base of the family 'llama'"),
    "a norm": ("llama", {"more": ["blk.0.attn_norm.weight"]}, "attn_norm"),
    "no such matrix": ("llama", {"more": ["blk.9.attn_q.weight.lora_a"]}, "blk.9.attn_q.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_of_another_model_is_refused_by_name(case, tiny_llama, tmp_path):
    name, fields, said = REFUSED[case]
    model = random_model("llama", tiny_llama)
    model.save_pretrained(tmp_path / "base")
    write_adapter(
        tmp_path / "a.gguf", name, model.config, load_file(tmp_path / "base" / "model.safetensors"), 1.0, **fields
    )
    with pytest.raises(AttnError, match=re.escape(said)):
        read_adapter(tmp_path / "a.gguf", load_model(tmp_path / "base").model, tmp_path / "base")


def test_a_key_that_would_change_what_is_computed_is_refused_by_name(tiny_llama, tmp_path):
    config = transformers.AutoConfig.for_model(
        "qwen2", **FAMILIES["qwen2"][""] | {"vocab_size": len(tiny_llama.tokens)}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    changes = {
        "attention__scale": 0.3,
        "logit_scale": 0.5,
        "attn_logit_softcapping": 30.0,
        "rope__scaling__beta_fast": 8.0,
    }
    for key, value in changes.items():
        path = tmp_path / f"{key}.gguf"
        write(path, "qwen2", model, tmp_path / "theirs", tiny_llama, **{key: value})
        with pytest.raises(AttnError, match=key.replace("__", ".")):
            convert(path, tmp_path / key, "float32")


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_rotary_factors_are_unexpected_where_the_config_does_not_describe_them(family, tiny_llama, tmp_path):
    sizes = FAMILIES[family][""] | {"vocab_size": len(tiny_llama.tokens)} | NO_TOKENS
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes)).float()
    write(tmp_path / "bad.gguf", family, model, tmp_path / "theirs", tiny_llama, more=["rope_freqs.weight"])
    with pytest.raises(CheckpointInvalid, match=r"'rope_freqs\.weight' is unexpected"):
        convert(tmp_path / "bad.gguf", tmp_path / "ours", "float32")


def test_every_architecture_is_compared():
    encoders = {"bert", "modern-bert", "nomic-bert", "t5"}  # in test_gguf_encoders.py
    assert {case.split(",")[0] for case in CASES} | encoders == {family.name for family in GGUF_FAMILIES}
