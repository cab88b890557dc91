"""How the rows of a text become its vector, as sentence-transformers' modules.json says it (Reimers and Gurevych 2019,
arXiv 1908.10084, section 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attn_core.errors import CheckpointInvalid
from torch import Tensor, nn

from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json, read_json_object
from attn_models.weights.safetensors_files import LazyTensors, weight_files

MODULES = "modules.json"
TRANSFORMER, POOLING, DENSE, NORMALIZE = "Transformer", "Pooling", "Dense", "Normalize"

Pool = Callable[[Tensor, Tensor], Tensor]
"""From rows [text, token, size] and which of them are tokens [text, token], bool, to [text, size]."""


def cls_token(rows: Tensor, keep: Tensor) -> Tensor:  # noqa: ARG001 -- padding comes behind
    """The first row."""
    return rows[:, 0]


def mean(rows: Tensor, keep: Tensor) -> Tensor:
    """The mean of the rows."""
    return (rows * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)


def mean_sqrt_len(rows: Tensor, keep: Tensor) -> Tensor:
    """The sum of the rows, divided by √ of their number."""
    return (rows * keep[..., None]).sum(1) / keep.sum(1, keepdim=True).sqrt()


def maximum(rows: Tensor, keep: Tensor) -> Tensor:
    """The largest of each element."""
    return rows.masked_fill(~keep[..., None], -torch.inf).amax(1)


def weighted_mean(rows: Tensor, keep: Tensor) -> Tensor:
    """The mean of the rows, the i-th weighing i (SGPT, Muennighoff 2022, arXiv 2202.08904)."""
    weights = torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype) * keep
    return (rows * weights[..., None]).sum(1) / weights.sum(1, keepdim=True)


def last_token(rows: Tensor, keep: Tensor) -> Tensor:
    """The last row."""
    return rows[torch.arange(len(rows), device=rows.device), keep.sum(1) - 1]


POOLS: Mapping[str, Pool] = {
    "cls": cls_token,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len,
    "weightedmean": weighted_mean,
    "lasttoken": last_token,
}
"""By their names in sentence-transformers, in the order in which several are joined."""
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = {"Tanh": nn.Tanh, "Identity": nn.Identity, "ReLU": nn.ReLU, "GELU": nn.GELU, "Sigmoid": nn.Sigmoid}


class SentencePooling(nn.Module):
    """The vector of a text: its rows pooled in one or more ways side by side, then dense layers, and length 1."""

    def __init__(self, pools: Sequence[str] = ("mean",), dense: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.pools = tuple(pools)
        self.dense = nn.ModuleList(dense)

    @property
    def is_mean(self) -> bool:
        """Whether it is what a folder means that says nothing of it."""
        return self.pools == ("mean",) and not self.dense

    def size(self, hidden_size: int) -> int:
        """Elements of a vector, over rows of so many elements."""
        sizes = [layer.weight.shape[0] for layer in self.dense.modules() if isinstance(layer, nn.Linear)]
        return sizes[-1] if sizes else hidden_size * len(self.pools)

    def forward(self, rows: Tensor, keep: Tensor) -> Tensor:
        """Rows [text, token, hidden_size] and which of them are tokens [text, token], bool, to [text, size]."""
        vectors = torch.cat([POOLS[name](rows, keep) for name in self.pools], dim=-1)
        for layer in self.dense:
            vectors = layer(vectors)
        return nn.functional.normalize(vectors, dim=-1)


def read_pooling(folder: Path, hidden_size: int, default: Sequence[str] = ("mean",)) -> SentencePooling:
    """The pooling of a model folder; `default` where it has no modules.json.

    Raises `CheckpointInvalid` for a module or an option that is not known, and for sizes that do not fit.
    """
    path = member(folder, MODULES)
    if not path.is_file():
        return SentencePooling(default)
    pools: tuple[str, ...] = ()
    dense: list[nn.Module] = []
    for kind, place in modules_of(path):
        if kind == POOLING:
            pools = read_pools(place / "config.json", hidden_size)
        elif kind == DENSE:
            dense.append(read_dense(place, SentencePooling(pools, dense).size(hidden_size)))
    if not pools:
        raise CheckpointInvalid.of(path, f"has no module {POOLING}, which makes one vector of the rows of a text")
    return SentencePooling(pools, dense)


def modules_of(path: Path) -> list[tuple[str, Path]]:
    """The kind and the folder of each module, in their order; raises `CheckpointInvalid` for another order or kind."""
    listed, found = read_json(path, CONFIG_LIMIT), []
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise CheckpointInvalid.of(path, "is not a list of modules")
    for item in listed:
        kind = str(item.get("type")).rpartition(".")[2]
        if kind not in (TRANSFORMER, POOLING, DENSE, NORMALIZE):
            allowed = ", ".join((TRANSFORMER, POOLING, DENSE, NORMALIZE))
            raise CheckpointInvalid.of(path, f"the module {item.get('type')!r} is not known; allowed: {allowed}")
        name = str(item.get("path", ""))
        found.append((kind, member(path.parent, name) if name else path.parent))
    kinds = [kind for kind, _ in found]
    middle = kinds[2:-1] if kinds[-1:] == [NORMALIZE] else kinds[2:]
    if kinds[:2] != [TRANSFORMER, POOLING] or set(middle) - {DENSE}:
        order = f"{TRANSFORMER}, {POOLING}, any {DENSE}, {NORMALIZE} or not"
        raise CheckpointInvalid.of(path, f"modules {', '.join(kinds)} are not allowed; allowed: {order}")
    return found


def read_pools(path: Path, hidden_size: int) -> tuple[str, ...]:
    """The names of the poolings that a module's config.json asks for."""
    values = read_json_object(path, CONFIG_LIMIT)
    known = {*FLAGS, "pooling_mode", "word_embedding_dimension", "embedding_dimension", "include_prompt"}
    if unknown := sorted(values.keys() - known):
        raise CheckpointInvalid.of(path, f"{', '.join(unknown)}: not known; allowed: {', '.join(sorted(known))}")
    size = values.get("word_embedding_dimension", values.get("embedding_dimension", hidden_size))
    if size != hidden_size:
        raise CheckpointInvalid.of(path, f"pools rows of {size!r} elements; the encoder's have {hidden_size}")
    mode = values.get("pooling_mode")
    asked = {name for flag, name in FLAGS.items() if values.get(flag)}
    if mode is not None:
        asked |= set(mode if isinstance(mode, list) else [mode])
    if not asked or asked - POOLS.keys():
        given = ", ".join(sorted(map(str, asked))) or "none"
        raise CheckpointInvalid.of(path, f"pooling {given} is not allowed; allowed: {', '.join(POOLS)}")
    return tuple(name for name in POOLS if name in asked)


def read_dense(folder: Path, size: int) -> nn.Module:
    """A linear layer with its activation, over vectors of `size` elements."""
    values = read_json_object(folder / "config.json", CONFIG_LIMIT)
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in ACTIVATIONS:
        rule = f"activation_function {values.get('activation_function')!r} is not allowed; allowed: "
        raise CheckpointInvalid.of(folder / "config.json", rule + ", ".join(ACTIVATIONS))
    tensors = LazyTensors(weight_files(folder))
    weight, bias = tensors["linear.weight"], tensors.get("linear.bias")
    if weight.ndim != 2 or weight.shape[1] != size:
        raise CheckpointInvalid.of(folder, f"its weight has shape {list(weight.shape)}; vectors have {size} elements")
    linear = nn.Linear(size, weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return nn.Sequential(linear, ACTIVATIONS[name]()).requires_grad_(requires_grad=False)
