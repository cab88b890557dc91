"""Writes GGUF files for llama.cpp, from the published layout that expresses a model.

Tensors are changed as llama.cpp's converters change them: the rows of Llama's rotary pairs stand next to each other,
the experts of a layer are stacked, the matrices of GPT-2 are transposed, and Gemma's gains of norms are stored whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import DecoderConfig
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from torch import Tensor

from attn_models.adapters.family import window_of
from attn_models.adapters.registry import decoder_adapter
from attn_models.attention import layer_attentions
from attn_models.export.gguf_vocabulary import Value, vocabulary_keys
from attn_models.export.k_quants import K_QUANTS, quantize_k
from attn_models.export.layouts import Expressed
from attn_models.loading import LoadedModel
from attn_models.weights.atomic_write import staged_file

QUANTIZATIONS: Mapping[str, tuple[GGMLQuantizationType, int]] = {
    "f32": (GGMLQuantizationType.F32, 0),
    "f16": (GGMLQuantizationType.F16, 1),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
    "q6_k": (GGMLQuantizationType.Q6_K, 18),
    "q5_k": (GGMLQuantizationType.Q5_K, 16),
    "q4_k": (GGMLQuantizationType.Q4_K, 14),
}
"""The types of matrices, and the `general.file_type` of files of them."""
UNEMBEDDING = ("output", "token_embd")
"""The tensor that computes logits, and the one that does where it is tied: rounding it costs most."""
QUANTIZATION_VERSION = 2
EXPERT = re.compile(r"experts\.(\d+)\.")
WHOLE = re.compile(r"position_embd|ffn_gate_inp|norm")
"""Matrices that stay in float32: they are added to activations, or route tokens."""

Keys = dict[str, Value]


def no_keys(config: DecoderConfig) -> Keys:  # noqa: ARG001  (most need none)
    """No further keys."""
    return {}


def _experts(config: DecoderConfig) -> Keys:
    if config.num_experts is None or config.num_experts_per_tok is None:
        return {}
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.expert_width,
    }


def _windows(config: DecoderConfig) -> list[int | None]:
    """The sliding window of each layer in tokens, None where it reaches over the whole context."""
    found = [window_of(layer.mechanism.spec(layer.config)) for layer in layer_attentions(config)]
    return [None if window is None or window >= config.max_seq_len else window for window in found]


def _gemma(config: DecoderConfig) -> Keys:
    """Keys of windows and soft caps; llama.cpp knows which layers have a window from the architecture."""
    spec = layer_attentions(config)[0].mechanism.spec(layer_attentions(config)[0].config)
    scales = {getattr(each, "scale", None) for each in ([spec.score] if spec else [])}
    size = config.head_dim or config.hidden_size // config.num_heads
    if scales - {None, size**-0.5}:
        raise Incompatible(f"llama.cpp divides the scores of Gemma's heads of size {size} by its root", field="scale")
    windows = [window for window in _windows(config) if window is not None]
    configs: list[Any] = [layer.config for layer in layer_attentions(config)]
    local = {each.base for each in configs if each.window and each.base}
    if local - {LOCAL_BASE}:
        raise Incompatible(f"llama.cpp rotates the windowed layers of Gemma 3 by the base {LOCAL_BASE}", field="base")
    caps = [modifier.cap for modifier in (spec.modifiers if spec else ()) if hasattr(modifier, "cap")]
    keys: Keys = {"attention.sliding_window": windows[0]} if windows else {}
    if caps:
        keys["attn_logit_softcapping"] = float(caps[0])
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return keys


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How llama.cpp stores a layout and what it computes for it.

    `period` is the period of layers with a sliding window, whose last layer has none, 0 where no layer may have one.
    Rows of rotary pairs are next to each other if `permuted`; `offset` is added to gains of norms. `fields` are values
    of the config that llama.cpp assumes. `keys` returns further keys of the header, without the architecture's name.
    """

    name: str
    permuted: bool = False
    offset: float = 0.0
    period: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    keys: Callable[[DecoderConfig], Keys] = no_keys


LOCAL_BASE = 10000.0
TANH = {"feed_forward": "gelu_tanh"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(name="llama", permuted=True),
    "mistral": Architecture(name="llama", permuted=True),
    "mixtral": Architecture(name="llama", permuted=True, keys=_experts),
    "qwen2": Architecture(name="qwen2"),
    "qwen3": Architecture(name="qwen3"),
    "qwen3_moe": Architecture(name="qwen3moe", keys=_experts),
    "gpt2": Architecture(name="gpt2", fields=TANH),
    "gemma2": Architecture(name="gemma2", offset=1.0, period=2, keys=_gemma),
    "gemma3_text": Architecture(name="gemma3", offset=1.0, period=6, keys=_gemma),
}
"""The architectures of llama.cpp, by the `model_type` of the layout."""


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A written file: its architecture in llama.cpp, and the type of each kind of matrix, such as "ffn_down"."""

    architecture: str
    types: Mapping[str, str]


def write_gguf(
    target: Path,
    loaded: LoadedModel,
    found: Expressed,
    quantization: str = "f16",
    importance: Mapping[str, Tensor] | None = None,
) -> GgufFile:
    """Write a model as the GGUF file `target`.

    A matrix whose rows do not consist of whole blocks of the type is stored as q8_0 or f16, and the one that computes
    logits as q6_k where the type has fewer bits; `types` of the result says so. `importance` holds the mean squares of
    the inputs [inputs] of parameters, by which errors of K-quants count.

    Raises `InvalidValue` for another `quantization`, `Incompatible` for a model or a tokenizer that llama.cpp does not
    compute as it is.
    """
    if quantization not in QUANTIZATIONS:
        raise InvalidValue.of("quantization", quantization, ", ".join(QUANTIZATIONS))
    if found.layout not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise Incompatible(f"a model in the layout {found.layout!r} cannot be written as GGUF; these can: {allowed}")
    architecture, adapter = ARCHITECTURES[found.layout], decoder_adapter(found.layout)
    config: DecoderConfig = adapter.from_hf_config(found.config)
    _require_computed(config, architecture)
    kind, number = QUANTIZATIONS[quantization]
    header: Keys = {
        "general.name": loaded.path.name,
        "general.file_type": number,
        **{f"{architecture.name}.{key}": value for key, value in _keys(config, architecture).items()},
        **vocabulary_keys(loaded.tokenizer, config.vocab_size),
    }
    if loaded.tokenizer is None:
        header[f"{architecture.name}.vocab_size"] = config.vocab_size
    if kind not in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        header["general.quantization_version"] = QUANTIZATION_VERSION
    layout = adapter.layout(config)
    sources = {item.name: item.parameters[0] for item in layout.stored(found.parameters) if item.parameters}
    types: dict[str, str] = {}
    with staged_file(target) as stage:
        writer = GGUFWriter(stage, architecture.name)
        for key, value in header.items():
            _add(writer, key, value)
        tensors = list(_tensors(found, config, architecture))
        last = next(part for part in UNEMBEDDING if any(own == f"{part}.weight" for own, _, _ in tensors))
        for name, theirs, tensor in tensors:
            part = name.split(".")[-2]
            typed = _type_of(name, tensor, GGMLQuantizationType.Q6_K if part == last and number in (14, 16) else kind)
            if tensor.ndim > 1:
                types[part] = typed.name.lower()
            counted = (importance or {}).get(sources.get(theirs, ""))
            writer.add_tensor(name, _stored(tensor, typed, counted), raw_dtype=typed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return GgufFile(architecture=architecture.name, types=types)


def _stored(tensor: Tensor, typed: GGMLQuantizationType, importance: Tensor | None) -> Any:
    """The bytes of a tensor in a type."""
    data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
    bits = K_QUANTS.get(typed.name.lower())
    if bits is None:
        return quantize(data, typed)
    return quantize_k(data, bits, None if importance is None else importance.float().cpu().numpy())


def _require_computed(config: DecoderConfig, architecture: Architecture) -> None:
    """Raise `Incompatible`, naming the fields, unless llama.cpp computes exactly this."""
    wrong = {name: given for name, value in architecture.fields.items() if (given := getattr(config, name)) != value}
    windows, period = _windows(config), architecture.period
    if any((window is not None) != bool(period and (layer + 1) % period) for layer, window in enumerate(windows)):
        wrong["window"] = windows
    scaling = (config.rope_scaling or {}).get("kind")
    if config.partial_rotary_factor != 1:
        wrong["partial_rotary_factor"] = config.partial_rotary_factor
    if scaling not in (None, "linear", "yarn"):
        wrong["rope_scaling"] = scaling
    if wrong:
        given = ", ".join(f"{name} {value!r}" for name, value in wrong.items())
        rule = f"llama.cpp's architecture {architecture.name!r} does not compute {given}"
        raise Incompatible(rule, field=next(iter(wrong)), fields=", ".join(wrong))


def _keys(config: DecoderConfig, architecture: Architecture) -> Keys:
    """The keys of a header that describe the model, without the name of the architecture."""
    size = config.head_dim or config.hidden_size // config.num_heads
    eps = "attention.layer_norm_rms_epsilon" if config.norm == "rms" else "attention.layer_norm_epsilon"
    keys: Keys = {
        "context_length": config.max_seq_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.inner_width,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads or config.num_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        eps: config.norm_eps,
    }
    if config.positions == "rotary":
        keys["rope.freq_base"] = config.rope_theta
    scaling = config.rope_scaling
    if scaling is not None:
        keys |= {"rope.scaling.type": scaling["kind"], "rope.scaling.factor": float(scaling["factor"])}
        if scaling["kind"] == "yarn":
            keys["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    return keys | architecture.keys(config)


def _tensors(found: Expressed, config: DecoderConfig, architecture: Architecture) -> Iterator[tuple[str, str, Tensor]]:
    """Names and tensors of the file, with their names in the layout."""
    kind = next(kind for kind in MODEL_ARCH if MODEL_ARCH_NAMES[kind] == architecture.name)
    names = get_tensor_name_map(kind, config.num_layers)
    layout = decoder_adapter(found.layout).layout(config)
    parameters = [parameter for parameter in found.parameters if layout.constant(parameter) is None]
    transposed = {item.name for item in layout.tensor_mappings(parameters) if item.transposed and not item.stacked}
    rotary_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads or config.num_heads}
    experts: dict[str, dict[int, Tensor]] = {}
    for theirs, tensor in found.tensors.items():
        expert = EXPERT.search(theirs)
        searched = theirs if expert is None else EXPERT.sub("experts.", theirs)
        own = next(filter(None, (names.get_name(each, (".weight", ".bias")) for each in _spellings(searched))), None)
        if own is None:
            raise Incompatible(f"llama.cpp's architecture {architecture.name!r} has no tensor for {theirs!r}")
        if expert is not None:
            experts.setdefault(own, {})[int(expert[1])] = tensor
            continue
        part, rows = own.split(".")[-2], tensor.T if theirs in transposed else tensor
        if architecture.permuted and part in rotary_heads:
            rows = _rotary_pairs(rows, rotary_heads[part])
        yield own, theirs, rows + architecture.offset if architecture.offset and "norm" in own else rows
    for own, parts in experts.items():
        yield own, "", torch.stack([parts[index] for index in range(len(parts))])


def _spellings(name: str) -> tuple[str, str]:
    """The name of a tensor, and as it is without the prefix that converters remove for some layouts."""
    return name, name.removeprefix("transformer.")


def _rotary_pairs(rows: Tensor, heads: int) -> Tensor:
    """The rows of a projection with those of a rotary pair, half a head apart, next to each other."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _type_of(name: str, tensor: Tensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    """The type in which a tensor is stored: `kind`, or the next wider one whose blocks divide its rows; float32 for
    vectors."""
    if tensor.ndim == 1 or WHOLE.search(name):
        return GGMLQuantizationType.F32
    row = tensor.shape[-1]
    chosen = (kind, GGMLQuantizationType.Q8_0) if kind.name.lower() in K_QUANTS else (kind,)
    fits = (each for each in chosen if row % GGML_QUANT_SIZES[each][0] == 0)
    return next(fits, GGMLQuantizationType.F16)


def _add(writer: GGUFWriter, key: str, value: Value) -> None:
    """Add a key to a header in the type that llama.cpp reads: whole numbers as uint32, others as float32."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case str():
            writer.add_string(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case _:
            writer.add_array(key, value)
