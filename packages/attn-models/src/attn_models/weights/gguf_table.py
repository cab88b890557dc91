"""The decoder families of GGUF files that are read by names of tensors, with the keys of each of them."""

from __future__ import annotations

from attn_models.adapters.base import FULL, SLIDING
from attn_models.weights.gguf_architectures import count_or, layer_count, number_or, vocabulary_size
from attn_models.weights.gguf_families import (
    EXPERTS,
    TURNED,
    WINDOW,
    GgufFamily,
    Keys,
    experts,
    first_tensor,
    layer_kinds,
    number,
)
from attn_models.weights.gguf_reader import GgufHeader
from attn_models.weights.gguf_rope import rope_parameters, shortest_float32

GPT2 = {
    "vocab_size": "vocab_size",
    "max_seq_len": "n_positions",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Keys of a GPT-2 config.json by decoder field."""


def _llama(header: GgufHeader) -> Keys:
    """A Llama, or where the file has experts a Mixtral."""
    if header.metadata.get("llama.expert_count", 0) != 0:
        return {"model_type": "mixtral", **experts(header, "num_local_experts", "intermediate_size")}
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {key: tensor in header.tensors for key, tensor in biases.items()} | {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
    }


PERIOD = 6
LOCAL_BASE = 10000.0
# Not stored in the file: scores are divided by √256 in every size of Gemma 3 but the largest, which divides by √168,
# and by √head_dim in every size of Gemma 2 but the largest, with 46 layers.
SCALARS = {62: 168}
LARGEST_2 = 46
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma3(header: GgufHeader) -> Keys:
    layers, base = layer_count(header), shortest_float32(number_or(header, "gemma3.rope.freq_base", 1e6))
    full = {**rope_parameters(header, "gemma3"), "rope_theta": base}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [SLIDING if (layer + 1) % PERIOD else FULL for layer in range(layers)],
        "query_pre_attn_scalar": SCALARS.get(layers, 256),
        "rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": LOCAL_BASE}},
        "sliding_window": header.count("gemma3.attention.sliding_window"),
    }


def _gemma2(header: GgufHeader) -> Keys:
    layers, heads = layer_count(header), header.count("gemma2.attention.head_count")
    width = header.count("gemma2.embedding_length")
    size = count_or(header, "gemma2.attention.key_length", width // heads)
    return {
        **{key: header.number(f"gemma2.{key}") for key in CAPS},
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [FULL if layer % 2 else SLIDING for layer in range(layers)],
        "query_pre_attn_scalar": width // heads if layers == LARGEST_2 else size,
        "sliding_window": header.count("gemma2.attention.sliding_window"),
    }


def _window(header: GgufHeader, name: str) -> Keys:
    """The sliding window; null where the file has none."""
    return {"sliding_window": window_of(header, f"{name}.attention.sliding_window")}


def window_of(header: GgufHeader, key: str) -> int | None:
    """The number of tokens under `key`; None where it is absent or, as in files without windows, 0."""
    return header.count(key) if header.metadata.get(key, 0) != 0 else None


def _phi3(header: GgufHeader) -> Keys:
    context = header.count("phi3.context_length")
    return _window(header, "phi3") | {
        "original_max_position_embeddings": count_or(header, "phi3.rope.scaling.original_context_length", context)
    }


def _granite(header: GgufHeader) -> Keys:
    theirs = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {
        key: number(header, f"granite.{name}") for key, name in theirs.items() if f"granite.{name}" in header.metadata
    }


def _falcon(header: GgufHeader) -> Keys:
    heads = header.count("falcon.attention.head_count")
    shared = count_or(header, "falcon.attention.head_count_kv", heads)
    two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    new = two_norms or shared not in (1, heads)
    keys = {"new_decoder_architecture": new, "multi_query": not new and shared == 1, "parallel_attn": True}
    return keys | ({"num_kv_heads": shared, "num_ln_in_parallel_attn": 2 if two_norms else 1} if new else {})


def _parallel(header: GgufHeader) -> Keys:
    return {"use_parallel_residual": header.flag("stablelm.use_parallel_residual", default=False)}


def _inner(header: GgufHeader) -> Keys:
    """The width of the feed-forward, for which converters write four times the model's."""
    return {"intermediate_size": first_tensor(header, "ffn_up")[0]}


def _starcoder(header: GgufHeader) -> Keys:
    """Multi-query attention: of a model with keys for each head, converters scramble the projection."""
    return {"multi_query": True, "n_inner": first_tensor(header, "ffn_up")[0]}


def _output_bias(header: GgufHeader) -> Keys:
    return {"attention_out_bias": "blk.0.attn_output.bias" in header.tensors}


def _exaone4(header: GgufHeader) -> Keys:
    """Windows, where the file has any."""
    window = window_of(header, "exaone4.attention.sliding_window")
    kinds = layer_kinds(header, 4)
    return {"sliding_window": window, "layer_types": kinds if window else [FULL] * len(kinds)}


def _qwen2_moe(header: GgufHeader) -> Keys:
    shared = first_tensor(header, "ffn_up_shexp")[0]
    return experts(header) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _olmoe(header: GgufHeader) -> Keys:
    return experts(header, width="intermediate_size") | {"norm_topk_prob": False}


LARGEST_4 = 128


def _llama4(header: GgufHeader) -> Keys:
    """The experts. Not stored in the file: models of 128 experts do not norm queries and keys."""
    found = experts(header, "num_local_experts", "intermediate_size")
    step = count_or(header, "llama4.interleave_moe_layer_step", 1)
    return found | {"interleave_moe_layer_step": step, "use_qk_norm": found["num_local_experts"] != LARGEST_4}


def _modern_bert(header: GgufHeader) -> Keys:
    """The windows, of which every third layer beginning with the first has none, and the rotary bases."""
    name = "modern-bert"
    bases = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
    return _encoder(header) | {
        "local_attention": header.count(f"{name}.attention.sliding_window"),
        "layer_types": layer_kinds(header, 3, first_full=True),
        "hidden_activation": header.metadata.get(f"{name}.hidden_activation", "gelu"),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": number(header, f"{name}.{key}")} for kind, key in bases.items()
        },
    }


ENCODER = {
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Keys of a BERT's config.json by field."""
MEAN, FIRST_TOKEN = 1, 2
POOLED = {"attention.causal": (False,), "pooling_type": (MEAN, FIRST_TOKEN)}
"""Of encoders, whose vector of a text is the mean of its tokens' or that of the first."""


def _encoder(header: GgufHeader) -> Keys:
    """The number of token types, of which only the first is used, and the pooling of a text."""
    found = header.tensors.get("token_types.weight")
    types = 1 if found is None or len(found.shape) != 2 else found.shape[0]
    pooling = header.metadata.get(f"{header.text('general.architecture')}.pooling_type")
    return {"type_vocab_size": types, "pooling_mode": "cls" if pooling == FIRST_TOKEN else "mean"}


def _t5(header: GgufHeader) -> Keys:
    """The config.json of a T5, or with position biases in every block of an UMT5.

    Not stored in the file: feed-forwards with a gate have GELU, others ReLU, as llama.cpp computes them, and only
    models without gates multiply hidden states before a tied unembedding.
    """
    layers, gated = layer_count(header), "enc.blk.0.ffn_gate.weight" in header.tensors
    tied = "output.weight" not in header.tensors
    return {
        "model_type": "umt5" if "enc.blk.1.attn_rel_b.weight" in header.tensors else "t5",
        "vocab_size": vocabulary_size(header),
        "d_model": header.count("t5.embedding_length"),
        "d_kv": header.count("t5.attention.key_length"),
        "d_ff": header.count("t5.feed_forward_length"),
        "num_layers": layers,
        "num_decoder_layers": count_or(header, "t5.decoder_block_count", layers),
        "num_heads": header.count("t5.attention.head_count"),
        "n_positions": header.count("t5.context_length"),
        "relative_attention_num_buckets": header.count("t5.attention.relative_buckets_count"),
        "layer_norm_epsilon": number(header, "t5.attention.layer_norm_rms_epsilon"),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied and not gated,
        "decoder_start_token_id": header.metadata.get("t5.decoder_start_token_id", 0),
    }


LAYER_NORM = TURNED | {"attention.layer_norm_epsilon"}
SCALES = frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"})

GGUF_FAMILIES = (
    GgufFamily("llama", "llama", _llama, permuted=True, read=TURNED | EXPERTS, relatives=("mistral", "mixtral")),
    GgufFamily("gemma2", "gemma2", _gemma2, read=WINDOW | set(CAPS)),
    GgufFamily(
        "gemma3",
        "gemma3_text",
        _gemma3,
        read=WINDOW | {"mm.tokens_per_image"},
        passed={"attention.sliding_window_pattern": (PERIOD,), "rope.freq_base_swa": (LOCAL_BASE,)},
    ),
    GgufFamily("qwen2", "qwen2", read=TURNED),
    GgufFamily("qwen3", "qwen3", read=TURNED),
    GgufFamily(
        "qwen3moe", "qwen3_moe", lambda header: experts(header) | {"norm_topk_prob": True}, read=TURNED | EXPERTS
    ),
    GgufFamily("phi3", "phi3", _phi3, read=WINDOW | {"rope.scaling.attn_factor"}),
    GgufFamily("smollm3", "smollm3", permuted=True, read=TURNED),
    GgufFamily("granite", "granite", _granite, permuted=True, read=TURNED | SCALES),
    GgufFamily("starcoder2", "starcoder2", lambda header: _window(header, "starcoder2"), read=LAYER_NORM | WINDOW),
    GgufFamily(
        "gptneox",
        "gpt_neox",
        lambda header: {"use_parallel_residual": bool(header.metadata.get("gptneox.use_parallel_residual", True))},
        read=LAYER_NORM | {"use_parallel_residual"},
    ),
    GgufFamily("falcon", "falcon", _falcon, read=LAYER_NORM),
    GgufFamily("gpt2", "gpt2", read=frozenset({"attention.layer_norm_epsilon"}), named=GPT2),
    GgufFamily("bloom", "bloom", read=LAYER_NORM),
    GgufFamily("mpt", "mpt", read=LAYER_NORM, passed={"attention.max_alibi_bias": (8.0,)}),
    GgufFamily(
        "command-r",
        "cohere",
        lambda header: {"logit_scale": number(header, "command-r.logit_scale")},
        read=LAYER_NORM | {"logit_scale"},
    ),
    GgufFamily(
        "cohere2",
        "cohere2",
        lambda header: _window(header, "cohere2") | {"logit_scale": number(header, "cohere2.logit_scale")},
        read=LAYER_NORM | WINDOW | {"logit_scale"},
    ),
    GgufFamily("glm4", "glm4", read=TURNED),
    GgufFamily("stablelm", "stablelm", _parallel, read=LAYER_NORM | {"use_parallel_residual"}),
    GgufFamily("phi2", "phi", _inner, read=LAYER_NORM),
    GgufFamily("starcoder", "gpt_bigcode", _starcoder, read=LAYER_NORM),
    GgufFamily("seed_oss", "seed_oss", _output_bias, read=TURNED),
    GgufFamily("ernie4_5", "ernie4_5", read=TURNED),
    GgufFamily("exaone4", "exaone4", _exaone4, read=WINDOW | {"attention.sliding_window_pattern"}),
    GgufFamily("chatglm", "glm", lambda header: {"attention_bias": "blk.0.attn_q.bias" in header.tensors}, read=TURNED),
    GgufFamily("qwen2moe", "qwen2_moe", _qwen2_moe, read=TURNED | EXPERTS | {"expert_shared_feed_forward_length"}),
    GgufFamily("llama4", "llama4_text", _llama4, read=TURNED | EXPERTS | {"interleave_moe_layer_step"}),
    GgufFamily("olmoe", "olmoe", _olmoe, read=TURNED | EXPERTS),
    GgufFamily(
        "bert", "bert", _encoder, read=frozenset({"attention.layer_norm_epsilon"}), passed=POOLED, named=ENCODER
    ),
    GgufFamily(
        "modern-bert",
        "modernbert",
        _modern_bert,
        read=WINDOW
        | {"attention.sliding_window_pattern", "rope.freq_base_swa", "attention.layer_norm_epsilon"}
        | {"hidden_activation", "classifier.pooling_type"},
        passed=POOLED,
        named={ours: theirs for ours, theirs in ENCODER.items() if ours != "tie_word_embeddings"}
        | {"norm_eps": "norm_eps", "tie_word_embeddings": "tie_word_embeddings"},
    ),
    GgufFamily("nomic-bert", "nomic_bert", _encoder, read=LAYER_NORM, passed=POOLED, named=ENCODER),
    GgufFamily(
        "t5",
        "t5",
        described=_t5,
        relatives=("umt5",),
        read=frozenset({"attention.layer_norm_epsilon", "attention.relative_buckets_count", "decoder_start_token_id"})
        | {"decoder_block_count"},
    ),
)
"""Families with a llama.cpp architecture that are read by `GgufFamily` alone."""
