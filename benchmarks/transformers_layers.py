"""Attention layers of transformers, as it runs them itself: peers of `benchmarks/mechanisms_cpu.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class Family(NamedTuple):
    """A type of model, the keys of its config that give the layer of a mechanism's config, and the layer's name."""

    kind: str
    keys: Mapping[str, Any]
    part: str = "self_attn"


def grouped(config: Any) -> dict[str, Any]:
    """The sizes of heads of a mechanism's config, as most families call them, and those of a window."""
    heads = config.head_layout
    sizes = {"num_attention_heads": heads.query, "num_key_value_heads": heads.key_value, "head_dim": heads.key_size}
    window = getattr(config, "window", None)
    kinds = {"layer_types": [SLIDING if window else FULL]}
    return sizes | kinds | ({"sliding_window": window} if window else {})


def latent(config: Any) -> dict[str, Any]:
    """The sizes of latent attention."""
    size = config.head_layout.key_size
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "kv_lora_rank": config.latent,
        "q_lora_rank": config.query_latent,
        "qk_rope_head_dim": config.rotary_size,
        "qk_nope_head_dim": config.nope_size or size,
        "v_head_dim": config.value_size or size,
    }


def gated_deltanet(config: Any) -> Family:
    heads, size = config.num_heads, config.head_layout.key_size
    sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_key_head_dim": size}
    sizes |= {"linear_value_head_dim": config.value_size or 2 * size, "layer_types": [LINEAR]}
    return Family("qwen3_5_text", sizes, "linear_attn")


def gated(config: Any) -> Family:
    return Family("afmoe" if config.window else "qwen3_5_text", grouped(config) | {"num_dense_layers": 1})


def sink(config: Any) -> Family:
    return Family("granite_swa", grouped(config))


def gemma(config: Any) -> Family:
    sizes = grouped(config)
    more = {"global_head_dim": sizes["head_dim"], "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return Family("gemma4_text", sizes | more)


def kda(config: Any) -> Family:
    sizes = {"num_heads": config.num_heads, "head_dim": config.head_layout.key_size, "short_conv_kernel_size": 4}
    return Family("kimi_linear", {"linear_attn_config": sizes | {"kda_layers": [1], "full_attn_layers": []}})


def mla(config: Any) -> Family:
    sizes = {"num_heads": config.num_heads, "head_dim": config.head_layout.key_size, "short_conv_kernel_size": 4}
    layers = {"linear_attn_config": sizes | {"kda_layers": [], "full_attn_layers": [1]}}
    return Family("kimi_linear", latent(config) | layers)


def sparse_mla(config: Any) -> Family:
    index = {"index_n_heads": config.index_heads, "index_head_dim": config.index_size, "index_topk": config.top}
    if config.pool is None:
        return Family("deepseek_v32", latent(config) | index)
    pools = {"index_kpool": config.pool, "layer_types": ["deepseek_sparse_attention"], "mlp_layer_types": ["dense"]}
    return Family("glm5_next_text", latent(config) | index | pools)


def compressed(config: Any) -> Family:
    sparse = "compressed_sparse_attention" if config.top else "heavily_compressed_attention"
    kind = SLIDING if config.every is None else sparse
    sizes = {"num_attention_heads": config.num_heads, "head_dim": config.head_layout.key_size, "layer_types": [kind]}
    sizes |= {"q_lora_rank": config.query_latent, "o_groups": config.output_groups, "sliding_window": config.window}
    sizes |= {
        "o_lora_rank": config.output_latent,
        "index_n_heads": config.index_heads,
        "compress_rates": {kind: config.every},
    }
    return Family("deepseek_v4", sizes | {"index_head_dim": config.index_size, "index_topk": config.top or 1})


def indexed_blocks(config: Any) -> Family:
    sizes = {"index_n_heads": config.head_layout.key_value, "index_topk_blocks": config.top}
    sizes |= {
        "index_head_dim": config.index_size,
        "index_block_size": config.block,
        "layer_types": ["minimax_m3_sparse"],
    }
    return Family("minimax_m3_vl_text", grouped(config) | sizes)


def lightning(config: Any) -> Family:
    return Family("minimax", grouped(config) | {"layer_types": [LINEAR]})


def short_conv(config: Any) -> Family:
    sizes = {"conv_L_cache": config.taps, "num_attention_heads": config.num_heads, "layer_types": ["conv"]}
    return Family("lfm2", sizes | {"num_key_value_heads": config.num_heads}, "conv")


def mamba2(config: Any) -> Family:
    sizes = {"num_heads": config.num_heads, "state_size": config.state_size, "n_groups": config.groups}
    return Family("mamba2", sizes | {"head_dim": 2 * config.hidden_size // config.num_heads}, "mixer")


FAMILIES: dict[str, Callable[[Any], Family]] = {
    each.__name__: each
    for each in (
        *(gated_deltanet, gated, sink, gemma, kda, mla, sparse_mla, compressed),
        *(indexed_blocks, lightning, short_conv, mamba2),
    )
}


def layer_of(mechanism: str, config: Any) -> Callable[[Any], Any]:
    """The layer of a model of one layer, called as the model calls it: with its mask, angles and attention function."""
    import torch
    from transformers import AutoConfig, AutoModel

    family, seen = FAMILIES[mechanism](config), {}
    small = {"num_hidden_layers": 1, "vocab_size": 8, "pad_token_id": 0, "hidden_size": config.hidden_size}
    small |= {"intermediate_size": 8, "moe_intermediate_size": 8}
    settings = AutoConfig.for_model(family.kind, **small | dict(family.keys))
    model = AutoModel.from_config(settings).eval()
    layer = getattr(model.layers[0], family.part)

    def catch(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:  # noqa: ARG001 -- as torch calls it
        seen["call"] = given, named

    def call(rows: Any) -> Any:
        if "call" not in seen:
            with layer.register_forward_pre_hook(catch, with_kwargs=True):
                model(input_ids=torch.zeros(rows.shape[:2], dtype=torch.int64), use_cache=False)
        given, named = seen["call"]
        if given:
            return layer(rows, *given[1:], **named)
        return layer(**named | {"hidden_states": rows})

    return call
