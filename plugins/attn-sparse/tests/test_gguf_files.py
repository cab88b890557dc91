"""Tiny GGUF files of Gemma 4 and MiniMax-M2, as llama.cpp's converter arranges them, give transformers' logits."""

import pytest
import torch
from attn_core.errors import Incompatible
from attn_models.loading import load_model
from attn_models.sources import convert
from attn_testing.families import NARROW
from attn_testing.gguf_files import TOKENS, described, difference, random_model, stored, write_gguf

pytest.importorskip("transformers")

WINDOWS, FULL = "sliding_attention", "full_attention"
GEMMA4 = (
    NARROW
    | {"head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 4, "sliding_window": 5}
    | {
        "layer_types": [WINDOWS, FULL] * 2,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": len(TOKENS),
        "num_kv_shared_layers": 0,
    }
)
SHARED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 6}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}
CASES = {
    "shared keys and values": SHARED,
    "keys are values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    "experts": EXPERTS,
}
PLACES = {"layer_scalar": "layer_output_scale.weight", "router.scale": "ffn_gate_inp.scale"}
PLACES |= {"router.per_expert_scale": "ffn_down_exps.scale", "experts.gate_up_proj": "ffn_gate_up_exps.weight"}


def gemma4(path, model, heads, **changed):
    """The file of a model; layers that attend to the keys of others have some, too, as published ones do."""
    config = model.config
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    widths = [48 * (1 + (layer >= layers - shared)) for layer in range(layers)]
    swa = [kind == WINDOWS for kind in config.layer_types]
    said = described(GEMMA4) | {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 16}
    said |= {f"attention.{kind}_length_swa": 8 for kind in ("key", "value")} | {"rope.dimension_count_swa": 8}
    said |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "attention.sliding_window": config.sliding_window}
    said |= {"attention.sliding_window_pattern": swa, "attention.shared_kv_layers": shared}
    said |= {"feed_forward_length": widths if shared else 48}
    said |= {"embedding_length_per_layer_input": config.hidden_size_per_layer_input}
    said["attention.head_count_kv"] = [2 if windowed else heads for windowed in swa]
    if config.final_logit_softcapping:
        said["final_logit_softcapping"] = config.final_logit_softcapping
    if config.enable_moe_block:
        said |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 12}
    tensors = [("rope_freqs.weight", torch.tensor([1.0] * 2 + [1e30] * 6))]
    tensors += [(f"blk.{layer}.attn_k.weight", torch.ones(16, 32)) for layer in range(layers - shared, layers)]
    last = tuple(f"blk.{layer}.attn_k" for layer in range(layers - shared, layers))
    tensors += [(own, tensor) for own, tensor in stored("gemma4", model, PLACES) if not own.startswith(last)]
    return write_gguf(path, "gemma4", said | changed, tensors)


def loaded(path):
    return load_model(convert(path, path.with_suffix(""), "stored")).model


@pytest.mark.parametrize("case", CASES)
def test_gemma4_gives_the_logits_of_transformers(case, tmp_path):
    model, heads = random_model("gemma4_text", **GEMMA4 | CASES[case]), CASES[case].get("num_global_key_value_heads", 2)
    assert difference(loaded(gemma4(tmp_path / "m.gguf", model, heads)), model) < 5e-5
    odd = gemma4(tmp_path / "odd.gguf", model, heads, **{"rope.dimension_count": 8})
    with pytest.raises(Incompatible, match=r"rope\.dimension_count is 8; allowed: 16"):
        loaded(odd)


def test_minimax_m2_gives_the_logits_of_transformers(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    sizes = NARROW | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": rope}
    model = random_model("minimax_m2", **sizes)
    said = described(sizes) | {"rope.freq_base": 5e6, "rope.dimension_count": 4, "expert_gating_func": 2}
    said |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
    places = {"mlp.e_score_correction_bias": "exp_probs_b.bias"}
    path = write_gguf(tmp_path / "m.gguf", "minimax-m2", said, stored("minimax-m2", model, places))
    assert difference(loaded(path), model) < 5e-5
