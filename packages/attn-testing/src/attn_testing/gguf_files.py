"""Tiny GGUF files, written by the gguf package, of random models of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BYTES = [chr(c) for c in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144))]
TOKENS = ["<s>", *BYTES, "he"]


def random_model(family: str, **fields: Any) -> Any:
    """A model of transformers with random weights, gains around 1, and as many tokens as a file has."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **fields | {"vocab_size": len(TOKENS), "rms_norm_eps": 1e-5})
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        learned = [named for named in model.named_buffers() if named[0].endswith(("bias", "scalar"))]
        for name, tensor in (*model.named_parameters(), *learned):
            tensor.normal_(mean=float("norm" in name or "scal" in name), std=0.2)
    return model


def write_gguf(path: Path, name: str, said: Mapping[str, Any], tensors: Iterable[tuple[str, Any]]) -> Path:
    """Write a file of the architecture `name` with these keys (without the name) and tensors, and a tokenizer."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, name)
    kinds: dict[type, Any] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in said.items():
        kinds.get(type(value), writer.add_array)(f"{name}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * (len(TOKENS) - 1))
    writer.add_token_merges(["h e"])
    for own, tensor in tensors:
        writer.add_tensor(own, np.ascontiguousarray(tensor.detach().numpy()))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def named(name: str, layers: int, theirs: str) -> str:
    """The name of a tensor of transformers in files of the architecture `name`, by the gguf package's table."""
    import gguf

    kind = next(kind for kind in gguf.MODEL_ARCH if gguf.MODEL_ARCH_NAMES[kind] == name)
    return str(gguf.get_tensor_name_map(kind, layers).get_name(theirs, (".weight", ".bias")))


def stored(name: str, model: Any, places: Mapping[str, str]) -> Iterable[tuple[str, Any]]:
    """The tensors of a model by their names in a file; `places` has those of a layer that the table lacks. The gates
    and ups of experts are apart, unless it has their name."""
    layers = model.config.num_hidden_layers
    for theirs, tensor in model.state_dict().items():
        layer, _, rest = theirs.removeprefix("model.layers.").partition(".")
        block = f"blk.{layer}."
        if rest in places:
            yield f"{block}{places[rest]}", tensor
        elif theirs.endswith("experts.gate_up_proj"):
            places_apart = (f"{block}ffn_{word}_exps.weight" for word in ("gate", "up"))
            yield from zip(places_apart, tensor.chunk(2, dim=1), strict=True)
        elif theirs.endswith("experts.down_proj"):
            yield f"{block}ffn_down_exps.weight", tensor
        elif "lm_head" not in theirs or not model.config.tie_word_embeddings:
            yield named(name, layers, theirs), tensor


def described(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for every architecture, of a config.json."""
    return {
        "block_count": sizes["num_hidden_layers"],
        "context_length": sizes["max_position_embeddings"],
        "embedding_length": sizes["hidden_size"],
        "feed_forward_length": sizes["intermediate_size"],
        "attention.head_count": sizes["num_attention_heads"],
        "attention.head_count_kv": sizes["num_key_value_heads"],
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of the logits of two models."""
    import torch

    tokens = torch.randint(1, len(TOKENS), (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float((ours(tokens) - theirs(tokens).logits).abs().max())
