"""GGUF files of DeepSeek, gpt-oss and Mamba-2, whose tensors are divided otherwise than those of a Hugging Face folder.

llama.cpp's converter splits the key/value up-projection of DeepSeek into transposed keys and values, and the
projections of gpt-oss's experts, whose rows alternate in a folder, into gate and up; it stores the decays of Mamba-2
instead of their logarithms.
"""

from __future__ import annotations

import re

from attn_core.errors import Incompatible

from attn_models.weights.gguf_architectures import (
    Part,
    Placement,
    count_or,
    layer_count,
    number_or,
    vocabulary_size,
)
from attn_models.weights.gguf_families import EXPERTS, TURNED, WINDOW, GgufFamily, Keys, number
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.gguf_rope import rope_parameters, shortest_float32

LAYER = re.compile(r"\.layers\.(\d+)\.")
RMS = "attention.layer_norm_rms_epsilon"


def refused(header: GgufHeader, key: str, allowed: str) -> Incompatible:
    """The error for an unsupported value of a metadata key."""
    given = header.metadata.get(key, "missing")
    return Incompatible(f"{header.path}: {key} is {given!r}; allowed: {allowed}", path=header.path, what=key)


def _block(theirs: str) -> str:
    layer = LAYER.search(theirs)
    return "" if layer is None else f"blk.{layer[1]}."


def _common(header: GgufHeader, name: str) -> Keys:
    return {
        "vocab_size": vocabulary_size(header),
        "hidden_size": header.count(f"{name}.embedding_length"),
        "num_hidden_layers": layer_count(header),
        "max_position_embeddings": header.count(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


# DeepSeek V2 and V3.

GATES = {1: "deepseek_v2", 2: "deepseek_v3"}
"""`model_type` by the number of the router's score function: softmax (1) and sigmoid (2)."""
COUNTS_WITH_GROUPS = (160, 256)
"""Numbers of experts of the models that select groups of experts first, which older files do not store."""
MLA = "deepseek2.attention."


def _sigmoid(header: GgufHeader) -> bool:
    gate = header.metadata.get("deepseek2.expert_gating_func", 0)
    biased = any(name.endswith(".exp_probs_b.bias") for name in header.tensors)
    if gate in (0, None):
        return biased
    if gate not in GATES or (gate == 1 and biased):
        raise refused(header, "deepseek2.expert_gating_func", "1, softmax, or 2, sigmoid with biases")
    return bool(gate == 2)


def _split(header: GgufHeader) -> bool:
    """Whether the up-projections of keys and of values are separate tensors."""
    return "blk.0.attn_k_b.weight" in header.tensors


def _latent(header: GgufHeader) -> Keys:
    """The sizes of heads. With split up-projections, keys without `_mla` describe the latent head of all queries."""
    rotary_size, suffix = header.count("deepseek2.rope.dimension_count"), "_mla" if _split(header) else ""
    key, value = header.count(f"{MLA}key_length{suffix}"), header.count(f"{MLA}value_length{suffix}")
    if key <= rotary_size:
        raise refused(header, f"{MLA}key_length{suffix}", f"more than the {rotary_size} rotary elements of a head")
    query = f"{MLA}q_lora_rank"
    return {
        "num_attention_heads": header.count(f"{MLA}head_count"),
        "num_key_value_heads": header.count(f"{MLA}head_count"),
        "kv_lora_rank": header.count(f"{MLA}kv_lora_rank"),
        "q_lora_rank": header.count(query) if query in header.metadata else None,
        "qk_rope_head_dim": rotary_size,
        "qk_nope_head_dim": key - rotary_size,
        "v_head_dim": value,
        "head_dim": rotary_size,
    }


def _deepseek_experts(header: GgufHeader, layers: int, *, sigmoid: bool) -> Keys:
    dense = header.metadata.get("deepseek2.leading_dense_block_count", 0)
    count = header.metadata.get("deepseek2.expert_count", 0)
    if not count:
        return {"first_k_dense_replace": layers, "n_routed_experts": None}
    normed = header.flag("deepseek2.expert_weights_norm", default=False)
    if normed != sigmoid:
        raise refused(header, "deepseek2.expert_weights_norm", "true with sigmoid scores, false with softmax")
    groups, groups_used = (f"deepseek2.expert_group_{word}" for word in ("count", "used_count"))
    if groups not in header.metadata and count in COUNTS_WITH_GROUPS:
        raise refused(
            header,
            groups,
            f"the number of groups, which a model of {count} experts needs; convert it again with a newer llama.cpp",
        )
    group_count = count_or(header, groups, 1)
    return {
        "first_k_dense_replace": dense,
        "n_routed_experts": count,
        "num_experts_per_tok": header.count("deepseek2.expert_used_count"),
        "n_shared_experts": header.metadata.get("deepseek2.expert_shared_count", 0) or None,
        "moe_intermediate_size": header.count("deepseek2.expert_feed_forward_length"),
        "routed_scaling_factor": shortest_float32(number_or(header, "deepseek2.expert_weights_scale", 1.0)),
        "norm_topk_prob": normed,
        "n_group": group_count,
        "topk_group": count_or(header, groups_used, 1),
        **({} if sigmoid else {"topk_method": "group_limited_greedy" if group_count > 1 else "greedy"}),
    }


def _deepseek(header: GgufHeader) -> Keys:
    """The config.json of a DeepSeek V2 or V3 model."""
    common, sigmoid = _common(header, "deepseek2"), _sigmoid(header)
    rope = rope_parameters(header, "deepseek2")
    multiplier = "deepseek2.rope.scaling.yarn_log_multiplier"
    if multiplier in header.metadata and rope["rope_type"] != "default":
        # Not stored in the file: the models have equal `mscale` (queries and keys) and `mscale_all_dim` (scores).
        weight = round(number(header, multiplier) * 10, 9)
        rope |= {"mscale": weight, "mscale_all_dim": weight}
    return {
        "model_type": GATES[2 if sigmoid else 1],
        **common,
        **_latent(header),
        **_deepseek_experts(header, common["num_hidden_layers"], sigmoid=sigmoid),
        "intermediate_size": header.count("deepseek2.feed_forward_length"),
        "rms_norm_eps": number(header, f"deepseek2.{RMS}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": rope,
    }


def _deepseek_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:
    block = _block(theirs)
    if theirs.endswith("mlp.gate.e_score_correction_bias"):
        return Placement(f"{block}exp_probs_b.bias", theirs, shape)
    if not theirs.endswith("kv_b_proj.weight") or not _split(header):
        return None
    heads, latent = config["num_attention_heads"], config["kv_lora_rank"]
    keys = Part(f"{block}attn_k_b.weight", (heads, latent, config["qk_nope_head_dim"]), axes=(0, 2, 1))
    values = Part(f"{block}attn_v_b.weight", (heads, config["v_head_dim"], latent))
    return Placement(keys.source, theirs, shape, parts=(keys, values), axis=1)


# gpt-oss.


def _gpt_oss(header: GgufHeader) -> Keys:
    """The keys of experts, window and rotary positions. YaRN's `truncate` (false) is not stored in the file."""
    inner = header.count("gpt-oss.feed_forward_length")
    if count_or(header, "gpt-oss.expert_feed_forward_length", inner) != inner:
        raise refused(header, "gpt-oss.expert_feed_forward_length", f"{inner}, as gpt-oss.feed_forward_length")
    rope = rope_parameters(header, "gpt-oss")
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return {
        "num_local_experts": header.count("gpt-oss.expert_count"),
        "num_experts_per_tok": header.count("gpt-oss.expert_used_count"),
        "sliding_window": header.count("gpt-oss.attention.sliding_window"),
        "rope_parameters": rope,
    }


def _gpt_oss_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:  # noqa: ARG001
    block, (count, *_) = _block(theirs), shape
    if theirs.endswith("self_attn.sinks"):
        return Placement(f"{block}attn_sinks.weight", theirs, shape)
    if theirs.endswith("post_attention_layernorm.weight"):
        return Placement(f"{block}post_attention_norm.weight", theirs, shape)
    if theirs.endswith("down_proj_bias"):
        return Placement(f"{block}ffn_down_exps.bias", theirs, shape)
    if theirs.endswith("experts.down_proj"):
        down = Part(f"{block}ffn_down_exps.weight", (count, shape[2], shape[1]), axes=(0, 2, 1))
        return Placement(down.source, theirs, shape, parts=(down,))
    if "experts.gate_up_proj" not in theirs:
        return None
    # Columns of gate and up alternate.
    inner, leaf = shape[-1] // 2, "bias" if theirs.endswith("_bias") else "weight"
    axes, stored = ((), (count, inner)) if leaf == "bias" else ((0, 2, 1), (count, inner, shape[1]))
    view = (*shape[:-1], inner, 1)
    parts = tuple(Part(f"{block}ffn_{word}_exps.{leaf}", stored, axes, view) for word in ("gate", "up"))
    return Placement(parts[0].source, theirs, shape, parts=parts, axis=len(shape))


# Mamba-2.


def _mamba2(header: GgufHeader) -> Keys:
    """The config.json of a Mamba-2 model; raises Incompatible for several groups.

    With several groups llama.cpp normalises each group separately, transformers all of them together.
    """
    common, sizes = _common(header, "mamba2"), {}
    for ours, key in (("state_size", "state_size"), ("conv_kernel", "conv_kernel"), ("num_heads", "time_step_rank")):
        sizes[ours] = header.count(f"mamba2.ssm.{key}")
    inner, width = header.count("mamba2.ssm.inner_size"), common["hidden_size"]
    if inner % width or inner % sizes["num_heads"]:
        raise refused(header, "mamba2.ssm.inner_size", f"a multiple of {width} and of {sizes['num_heads']} heads")
    if count_or(header, "mamba2.ssm.group_count", 1) != 1:
        raise refused(header, "mamba2.ssm.group_count", "1")
    return {
        "model_type": "mamba2",
        **common,
        **sizes,
        "n_groups": 1,
        "expand": inner // width,
        "head_dim": inner // sizes["num_heads"],
        "layer_norm_epsilon": number(header, f"mamba2.{RMS}"),
        "use_bias": "blk.0.ssm_in.bias" in header.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in header.tensors,
        "hidden_act": "silu",
    }


def _mamba2_place(header: GgufHeader, config: Keys, theirs: str, shape: tuple[int, ...]) -> Placement | None:  # noqa: ARG001
    block, (_, _, leaf) = _block(theirs), theirs.partition(".mixer.")
    gguf_tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "A_log": ("ssm_a", (*shape, 1)),
        "D": ("ssm_d", (*shape, 1)),
        "dt_bias": ("ssm_dt.bias", shape),
        "norm.weight": ("ssm_norm.weight", (1, *shape)),
        "conv1d.weight": ("ssm_conv1d.weight", (shape[0], shape[-1])),
    }
    if leaf not in gguf_tensors:
        return None
    source, stored = gguf_tensors[leaf]
    part = Part(f"{block}{source}", stored)
    return Placement(part.source, theirs, shape, parts=(part,), decay=leaf == "A_log")


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


LATENTS = _keys(
    *(f"attention.{name}" for name in ("q_lora_rank", "kv_lora_rank", "key_length_mla", "value_length_mla"))
)
ROUTED = EXPERTS | _keys(
    "leading_dense_block_count",
    *(f"expert_{word}" for word in ("shared_count", "weights_scale", "weights_norm", "gating_func")),
    *("expert_group_count", "expert_group_used_count", "rope.scaling.yarn_log_multiplier"),
)
STATES = _keys(
    *(f"ssm.{word}" for word in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
)
JOINED_FAMILIES: tuple[GgufFamily, ...] = (
    GgufFamily(
        "deepseek2",
        "deepseek_v2",
        read=TURNED | LATENTS | ROUTED,
        described=_deepseek,
        placed=_deepseek_place,
        relatives=("deepseek_v3",),
    ),
    GgufFamily("gpt-oss", "gpt_oss", _gpt_oss, read=WINDOW | EXPERTS, placed=_gpt_oss_place),
    GgufFamily("mamba2", "mamba2", read=STATES | _keys("vocab_size"), described=_mamba2, placed=_mamba2_place),
)
"""The families that read such files."""
