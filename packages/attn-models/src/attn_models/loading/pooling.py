"""Pools the hidden states of a text to its embedding, as the modules.json of sentence-transformers specifies (Reimers
and Gurevych 2019, arXiv 1908.10084, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid
from torch import Tensor, nn

from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json, read_json_object
from attn_models.weights.safetensors_files import LazyTensors, require_floats, weight_files

MODULES = "modules.json"
TRANSFORMER, POOLING, DENSE, NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"
LAYER_NORM, DROPOUT = "LayerNorm", "Dropout"
KINDS = (TRANSFORMER, POOLING, DENSE, NORMALIZE, LAYER_NORM, DROPOUT)

Pool = Callable[[Tensor, Tensor], Tensor]
"""A function from hidden states [text, token, size] and a mask of real tokens [text, token], bool, to [text, size]."""


def cls_token(rows: Tensor, keep: Tensor) -> Tensor:
    """The hidden state of the first token."""
    return rows[torch.arange(len(rows), device=rows.device), keep.int().argmax(1)]


def mean(rows: Tensor, keep: Tensor) -> Tensor:
    """The mean of the tokens' hidden states."""
    return (rows * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


def mean_sqrt_len(rows: Tensor, keep: Tensor) -> Tensor:
    """The sum of the tokens' hidden states, divided by the square root of their number."""
    return (rows * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).sqrt()


def maximum(rows: Tensor, keep: Tensor) -> Tensor:
    """The maximum of each element over the tokens."""
    return rows.masked_fill(~keep[..., None], -torch.inf).amax(1)


def weighted_mean(rows: Tensor, keep: Tensor) -> Tensor:
    """The weighted mean of the hidden states; token i, counted from 1, has weight i (SGPT, arXiv 2202.08904)."""
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype) * keep
    return (rows * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def last_token(rows: Tensor, keep: Tensor) -> Tensor:
    """The hidden state of the last real token."""
    last = keep.shape[1] - 1 - keep.int().flip(1).argmax(1)
    return rows[torch.arange(len(rows), device=rows.device), last]


POOLS: Mapping[str, Pool] = {
    "cls": cls_token,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len,
    "weightedmean": weighted_mean,
    "lasttoken": last_token,
}
"""The poolings by their names in sentence-transformers."""
DENSE_KEYS = {
    "use_residual": False,
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
}
"""Keys of a dense layer, and the only values that are supported."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {
    kind.__name__: kind for kind in (nn.Tanh, nn.Identity, nn.ReLU, nn.GELU, nn.Sigmoid, nn.SiLU, nn.Mish, nn.Softplus)
}


class Normalize(nn.Module):
    """Scales vectors [text, size] to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors of length 1."""
        return nn.functional.normalize(vectors, dim=-1)


class SentencePooling(nn.Module):
    """Computes the vector of a text: one or more poolings, concatenated, then `layers`, of which the first
    `truncate_dim` elements are kept, normalised to length 1. Without `include_prompt` the tokens of a prompt are not
    pooled."""

    def __init__(
        self, pools: Sequence[str] = ("mean",), layers: Sequence[nn.Module] = (), *, include_prompt: bool = True
    ) -> None:
        super().__init__()
        self.pools = tuple(pools)
        self.layers = nn.ModuleList(layers)
        self.include_prompt = include_prompt
        self.truncate_dim: int | None = None

    @property
    def is_mean(self) -> bool:
        """Whether this is the default pooling, that of a folder without modules.json: the mean and no layers."""
        return self.pools == ("mean",) and not self.layers

    def size(self, hidden_size: int) -> int:
        """The number of elements of a text's vector, for hidden states of `hidden_size` elements."""
        sizes = [layer.weight.shape[0] for layer in self.layers.modules() if isinstance(layer, nn.Linear)]
        whole = sizes[-1] if sizes else hidden_size * len(self.pools)
        return whole if self.truncate_dim is None else min(whole, self.truncate_dim)

    def forward(self, rows: Tensor, keep: Tensor) -> Tensor:
        """Map hidden states [text, token, hidden_size] and the mask of real tokens `keep` [text, token], bool, to
        vectors [text, size]."""
        vectors = torch.cat([POOLS[name](rows, keep) for name in self.pools], dim=-1)
        for layer in self.layers:
            vectors = layer(vectors)
        return nn.functional.normalize(vectors[:, : self.truncate_dim], dim=-1)


def read_pooling(folder: Path, hidden_size: int, default: Sequence[str] = ("mean",)) -> SentencePooling:
    """The pooling of a model folder; `default` if it has no modules.json.

    Raises `CheckpointInvalid` for an unknown module or option, and for sizes that do not fit.
    """
    path = member(folder, MODULES)
    if not path.is_file():
        return SentencePooling(default)
    found = SentencePooling(())
    for kind, module_folder in modules_of(path):
        if kind == POOLING:
            found.pools, found.include_prompt = read_pools(module_folder / "config.json", hidden_size)
        elif kind == DENSE:
            found.layers.append(read_dense(module_folder, found.size(hidden_size)))
        elif kind == LAYER_NORM:
            found.layers.append(read_layer_norm(module_folder, found.size(hidden_size)))
        elif kind == NORMALIZE:
            found.layers.append(Normalize())
    if found.layers and isinstance(found.layers[-1], Normalize):
        del found.layers[-1]  # `SentencePooling` does it
    return found


def modules_of(path: Path) -> list[tuple[str, Path]]:
    """The kind and folder of each module in modules.json, in order; raises `CheckpointInvalid` for any unsupported kind
    or order."""
    listed, found = read_json(path, CONFIG_LIMIT), []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise CheckpointInvalid.of(path, "is not a list of modules")
    for item in listed:
        kind = str(item.get("type")).rpartition(".")[2]
        if kind not in KINDS:
            raise CheckpointInvalid.of(path, f"unknown module {item.get('type')!r}; allowed: {', '.join(KINDS)}")
        name = str(item.get("path", ""))
        found.append((kind, member(path.parent, name) if name else path.parent))
    kinds = [kind for kind, _ in found]
    if kinds[:2] != [TRANSFORMER, POOLING] or {TRANSFORMER, POOLING} & set(kinds[2:]):
        order = f"{TRANSFORMER}, {POOLING}, then any number of {', '.join(KINDS[2:])}"
        raise CheckpointInvalid.of(path, f"modules {', '.join(kinds)} are not allowed; allowed: {order}")
    return found


def read_pools(path: Path, hidden_size: int) -> tuple[tuple[str, ...], bool]:
    """The names of the poolings in a module's config.json, in their order, and whether the tokens of a prompt are
    pooled too; raises `CheckpointInvalid` for others."""
    values = read_json_object(path, CONFIG_LIMIT)
    known = {*FLAGS, "pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt"}
    if unknown := sorted(values.keys() - known):
        raise CheckpointInvalid.of(path, f"unknown keys {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
    size = values.get("word_embedding_dimension", values.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise CheckpointInvalid.of(
            path, f"pools hidden states of {size!r} elements; those of the encoder have {hidden_size}"
        )
    mode = values.get("pooling_mode")
    names = [name for flag, name in FLAGS.items() if values.get(flag)]
    return pools_of(names if mode is None else mode, path), bool(values.get("include_prompt", True))


def pools_of(mode: Any, path: Path) -> tuple[str, ...]:
    """The names of poolings, of one or of a list; raises `CheckpointInvalid` naming `path` for others."""
    names = mode if isinstance(mode, list) else [mode]
    if not names or any(name not in POOLS for name in names):
        given = ", ".join(map(str, names)) or "none"
        raise CheckpointInvalid.of(path, f"pooling {given} is not allowed; allowed: {', '.join(POOLS)}")
    return tuple(names)


def read_dense(folder: Path, size: int) -> nn.Module:
    """A linear layer with its activation, over vectors of `size` elements."""
    values = read_json_object(folder / "config.json", CONFIG_LIMIT)
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        rule = f"activation_function {values.get('activation_function')!r} is not allowed; allowed: "
        raise CheckpointInvalid.of(folder / "config.json", rule + ", ".join(ACTIVATIONS))
    for key, only in DENSE_KEYS.items():
        if values.get(key) not in (None, only):
            raise CheckpointInvalid.of(folder / "config.json", f"{key} is {values[key]!r}; allowed: {only!r}")
    tensors = LazyTensors(weight_files(folder))
    if "linear.weight" not in tensors.entries:
        raise CheckpointInvalid.of(folder, "tensor 'linear.weight' is missing")
    require_floats(folder, tensors.entries, tensors)
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    if weight.ndim != 2 or weight.shape[1] != size:
        raise CheckpointInvalid.of(folder, f"its weight has shape {list(weight.shape)}; vectors have {size} elements")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise CheckpointInvalid.of(folder, f"its bias has shape {list(bias.shape)}; it has {len(weight)} outputs")
    linear = nn.Linear(size, weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return nn.Sequential(linear, ACTIVATIONS[name]()).requires_grad_(requires_grad=False)


def read_layer_norm(folder: Path, size: int) -> nn.Module:
    """A layer norm over vectors of `size` elements."""
    tensors = LazyTensors(weight_files(folder))
    shapes = {name: entry.shape for name, entry in tensors.entries.items()}
    if shapes != {"norm.weight": (size,), "norm.bias": (size,)}:
        raise CheckpointInvalid.of(
            folder, f"has tensors {shapes}; needed: norm.weight and norm.bias of {size} elements"
        )
    require_floats(folder, tensors.entries, tensors)
    norm = nn.LayerNorm(size)
    norm.load_state_dict({"weight": tensors["norm.weight"], "bias": tensors["norm.bias"]})
    return norm.requires_grad_(requires_grad=False)
