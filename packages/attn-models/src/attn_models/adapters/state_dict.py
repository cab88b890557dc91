"""Model parameters from the tensors of a checkpoint, and back."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from attn_core.checks import is_number
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_models.adapters.base import Layout, StoredTensor
from attn_models.device import require_memory
from attn_models.quantization.block_tensor import BlockTensor
from attn_models.weights import CheckpointFolder
from attn_models.weights.safetensors_files import require_floats

RANDOM_INIT_FUNCTIONS = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "xavier_uniform_", "kaiming_uniform_", "_no_grad_normal_"}
)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Build modules whose parameters and buffers have shapes and dtypes, but no memory (device "meta")."""
    with torch.device("meta"), _SkipRandomInit():
        yield


@contextmanager
def without_collections() -> Iterator[None]:
    """Pause the search for cyclic garbage, which building a model starts several times: each visits all objects of
    torch (0.1 s)."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


class _SkipRandomInit(TorchFunctionMode):
    """Skips random initialisation: on "meta" it has no effect, but torch imports its compiler for it (2 s)."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if (
            getattr(func, "__name__", "") in RANDOM_INIT_FUNCTIONS
            and isinstance(target, torch.Tensor)
            and target.is_meta
        ):
            return target
        return func(*args, **kwargs)


LENGTHS = (
    *("vocab_size", "hidden_size", "intermediate_size", "inner_width", "moe_intermediate_size", "head_dim"),
    *("num_heads", "num_kv_heads", "num_experts", "n_shared_experts"),
    *("latent", "query_latent", "rotary_size", "nope_size", "value_size", "state_size", "key_heads", "taps"),
)
"""Fields of configs and options of mechanisms for which some tensor has an axis that is at least as long."""
MODULES = ("num_layers", "num_decoder_layers", "num_nextn_predict_layers")
"""Fields that count modules which have tensors of their own."""


def check_config_fits(checkpoint: CheckpointFolder, config: Any) -> None:
    """Raises `InvalidValue` for a config larger than the tensors could fill, before it takes memory or time."""
    entries = checkpoint.tensors.entries
    largest = max((size for entry in entries.values() for size in entry.shape), default=0)
    limits = dict.fromkeys(LENGTHS, largest) | dict.fromkeys(MODULES, len(entries))
    if getattr(config, "positions", None) == "learned":
        limits["max_seq_len"] = largest
    if getattr(config, "num_experts", None) and all(map(config.is_sparse, range(config.num_layers))):
        # No layer has a dense feed-forward, whose inner size this is.
        limits = {field: limit for field, limit in limits.items() if field not in ("intermediate_size", "inner_width")}
    given = {field: getattr(config, field, None) for field in limits}
    choices = (*getattr(config, "pattern", ()), config)
    for options in (given, *(getattr(choice, "options", {}) for choice in choices)):
        for field, limit in limits.items():
            value = options.get(field)
            if is_number(value) and value > limit:
                raise InvalidValue.of(field, value, f"at most {limit}, by the tensors of the checkpoint")


def fill_buffers(model: nn.Module, fresh: nn.Module, device: torch.device | str) -> None:
    """Fill buffers that no checkpoint holds, on `device`, from `fresh`, a model of the same config on real memory."""
    values = dict(fresh.named_buffers())
    for name, buffer in list(model.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner).register_buffer(leaf, values[name].to(device), persistent=False)


def saved_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a model, with each parameter that several modules share only under its first name."""
    others = shared_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in others}


def shared_names(model: nn.Module) -> dict[str, str]:
    """The first name of each shared parameter by its other names, such as an unembedding that is the embedding."""
    first: dict[int, str] = {}
    return {
        name: owner
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (owner := first.setdefault(id(parameter), name)) != name
    }


def load_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Assign the tensors that `saved_parameters` names to a model, without a copy; shared parameters stay shared."""
    others = shared_names(model)
    both = {**parameters, **{name: parameters[owner] for name, owner in others.items()}}
    model.load_state_dict(both, assign=True)
    for name, owner in others.items():
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, model.get_parameter(owner))


Shapes = Mapping[str, tuple[int, ...]]
MOST_PROBLEMS = 8
"""Of so many tensors that do not fit all are named."""


def read_parameters(
    folder: CheckpointFolder, adapter: Layout, wanted: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Read a tensor for each name of `wanted`, whose tensors only give shapes.

    Floating-point tensors become `dtype`, except weights that stay in quantized blocks (`BlockTensor`). The result is
    on the device that the folder's tensors are read to. Raises `CheckpointInvalid` naming every missing, unexpected and
    misshaped tensor, and `OutOfCapacity` for a device without enough memory, before any tensor is read.
    """
    stored = adapter.stored(wanted)
    actual = require_fitting_tensors(folder, adapter, wanted)
    _require_tied(folder, adapter, stored)
    _require_copies(folder, adapter)
    _require_memory(folder, wanted, dtype)
    device = torch.device(folder.tensors.device)
    constants = {name: value for name in wanted if (value := adapter.constant(name)) is not None}
    parameters = {
        name: torch.full(wanted[name].shape, value, dtype=dtype, device=device) for name, value in constants.items()
    }
    several: dict[str, list[Tensor]] = {}
    for item in stored:
        tensor = folder.tensors[actual[item.name]]
        for part, piece in _pieces(item, tensor, wanted):
            # Adding the offset in 16 bits would lose the precision of small stored values.
            wide = item.float32 or item.offset
            needed = torch.promote_types(dtype, torch.float32) if wide else dtype
            stays = isinstance(piece, BlockTensor) and item.scale == 1 and not item.offset
            typed = (piece if stays or not piece.is_floating_point() else piece.to(needed)).contiguous()
            scaled = typed * item.scale if item.scale != 1 else typed
            parameters[part] = scaled + item.offset if item.offset else scaled
            if item.rows is not None:
                several.setdefault(part, []).append(parameters[part])
    return parameters | {part: torch.cat(pieces) for part, pieces in several.items()}


def require_fitting_tensors(folder: CheckpointFolder, adapter: Layout, wanted: Mapping[str, Tensor]) -> dict[str, str]:
    """The names in a folder of the tensors that hold the parameters `wanted`, found by headers alone.

    Raises `CheckpointInvalid` naming missing, unexpected and misshaped tensors, and those of no real numbers.
    """
    stored = adapter.stored(wanted)
    actual = _names(folder, adapter, stored)
    _require_match(folder, adapter, stored, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    real = [actual[item.name] for item in stored if wanted[item.parameters[0]].is_floating_point()]
    require_floats(folder.path, folder.tensors.entries, real)
    return actual


def stored_shapes(adapter: Layout, shapes: Shapes) -> dict[str, tuple[tuple[int, ...], int]]:
    """The shape and `groups` of every tensor of a checkpoint by name; `shapes` are those of the parameters."""
    return {item.name: (stored_shape(item, shapes), item.groups) for item in adapter.tensor_mappings(list(shapes))}


def _require_memory(folder: CheckpointFolder, wanted: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    device = torch.device(folder.tensors.device)
    needed = sum(tensor.numel() * dtype.itemsize for tensor in wanted.values()) - folder.tensors.saved_bytes(dtype)
    name = str(dtype).removeprefix("torch.")
    narrower = "--dtype bfloat16 needs half of it; " if dtype.itemsize > 2 else ""
    remedy = f"{narrower}choose another device with --device, such as cpu, or a smaller model."
    require_memory(device, needed, f"the model {folder.path.name} in {name}", remedy)


def stored_tensors(parameters: Mapping[str, Tensor], adapter: Layout) -> dict[str, Tensor]:
    """The checkpoint's tensors from a decoder's parameters.

    Raises `Incompatible` for a parameter that the layout does not store because it must be one, but is not.
    """
    for name, parameter in parameters.items():
        value = None if adapter.unread.search(name) else adapter.constant(name)
        if value is not None and bool((parameter != value).any()):
            message = f"the parameter {name!r} cannot be expressed in a {adapter.model_type} folder"
            raise Incompatible(
                f"{message}: that layout does not store it, and its value there is always {value:g}", parameter=name
            )
    tensors = {}
    for item in adapter.stored(parameters):
        found = [_whole(share, parameters) for share in item.shares()]
        tensors[item.name] = torch.stack(found) if item.stacked else found[0]
    return tensors


def _whole(item: StoredTensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """The checkpoint tensor of these parameters, or one index of a stacked tensor."""
    whole = joined_parts([parameters[part].detach() for part in item.parameters], item.groups)
    whole = whole if item.rows is None else whole[slice(*item.rows)]
    whole = whole - item.offset if item.offset else whole
    whole = whole / item.scale if item.scale != 1 else whole
    whole = whole.unsqueeze(1) if item.depthwise else whole
    whole = whole if item.shape is None else whole.reshape(item.shape)
    return whole.T.contiguous() if item.transposed else whole


def _pieces(item: StoredTensor, tensor: Tensor, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The parameters that a tensor holds, before scale and offset are applied."""
    for share, given in zip(item.shares(), tensor.unbind() if item.stacked else [tensor], strict=True):
        whole = given.T if item.transposed else given
        whole = whole.squeeze(1) if item.depthwise else whole
        # With `rows` a tensor has a part of the first axis only.
        whole = whole if item.shape is None else whole.reshape(-1, *wanted[share.parameters[0]].shape[1:])
        sizes = [wanted[part].shape[0] for part in share.parameters]
        yield from zip(share.parameters, split_parts(whole, sizes, item.groups), strict=True)


def split_parts(whole: Tensor, sizes: list[int], groups: int) -> list[Tensor]:
    """Split into parts of these sizes, which follow each other within each group of the first axis."""
    if len(sizes) == 1:
        return [whole]
    if groups == 1:
        return list(torch.split(whole, sizes))
    pieces = torch.split(whole.reshape(groups, -1, *whole.shape[1:]), [size // groups for size in sizes], dim=1)
    return [piece.flatten(0, 1) for piece in pieces]


def joined_parts(parts: list[Tensor], groups: int) -> Tensor:
    """Concatenate parts; the inverse of `split_parts`."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _require_match(folder: CheckpointFolder, adapter: Layout, stored: list[StoredTensor], shapes: Shapes) -> None:
    entries = folder.tensors.entries
    actual = _names(folder, adapter, stored)
    expected = {item.name: stored_shape(item, shapes) for item in stored}
    missing, problems = [f"tensor {name!r} is missing" for name in expected if name not in actual], list[str]()
    for name, own in actual.items():
        if name not in expected:
            if name != adapter.head and not adapter.is_derived(name):
                problems.append(f"tensor {own!r} is unexpected: the model has no such parameter")
        elif entries[own].shape != expected[name]:
            given, needed = list(entries[own].shape), list(expected[name])
            problems.append(f"tensor {own!r} has shape {given}; its model needs {needed}")
    if problems or missing:
        problems = [*sorted(problems), *sorted(missing)]
        more = f"; and {len(problems) - MOST_PROBLEMS} more" if len(problems) > MOST_PROBLEMS else ""
        raise CheckpointInvalid.of(folder.path, "; ".join(problems[:MOST_PROBLEMS]) + more)


def _require_tied(folder: CheckpointFolder, adapter: Layout, stored: list[StoredTensor]) -> None:
    """Raises `CheckpointInvalid` if the config ties the unembedding but the checkpoint's differs from the embedding."""
    if any(item.name == adapter.head for item in stored) or not has_other_head(folder, adapter, stored):
        return
    rule = f"tie_word_embeddings is true, but {adapter.head!r} is not the embedding; set it to false or remove one"
    raise CheckpointInvalid.of(folder.path, rule)


def has_other_head(folder: CheckpointFolder, adapter: Layout, stored: list[StoredTensor]) -> bool:
    """Whether the checkpoint has an unembedding that differs from its embedding."""
    actual = _names(folder, adapter, stored)
    embedding = next((item.name for item in stored if item.parameters == (adapter.embedding,)), None)
    if adapter.head not in actual or embedding not in actual:
        return False
    return not torch.equal(folder.tensors[actual[adapter.head]], folder.tensors[actual[embedding]])


def _names(folder: CheckpointFolder, adapter: Layout, stored: list[StoredTensor]) -> dict[str, str]:
    """The names in the checkpoint of the tensors `stored`; a tied checkpoint may have the unembedding alone."""
    actual = adapter.canonical_names(folder.tensors.entries)
    embedding = next((item.name for item in stored if item.parameters == (adapter.embedding,)), None)
    if embedding is not None and embedding not in actual and all(item.name != adapter.head for item in stored):
        actual |= {embedding: actual.pop(adapter.head)} if adapter.head in actual else {}
    return actual


def _require_copies(folder: CheckpointFolder, adapter: Layout) -> None:
    """Raises `CheckpointInvalid` if two names of the same tensor have different values, as only one is read."""
    for name, original in adapter.copies.items():
        both = {name, original} <= folder.tensors.entries.keys()
        if both and not torch.equal(folder.tensors[name], folder.tensors[original]):
            raise CheckpointInvalid.of(
                folder.path,
                f"{name!r} differs from {original!r}; they must be equal, as the model shares one parameter for both",
            )


def stored_shape(item: StoredTensor, shapes: Shapes) -> tuple[int, ...]:
    """The shape of a tensor of a checkpoint; `shapes` are those of the parameters."""
    if item.stacked:
        return (item.stacked, *stored_shape(item.shares()[0], shapes))
    if item.shape is not None:
        return item.shape
    parts = [shapes[part] for part in item.parameters]
    if item.rows is not None:
        parts = [(item.rows[1] - item.rows[0], *parts[0][1:])]
    shape = (sum(part[0] for part in parts), *parts[0][1:]) if len(parts) > 1 else parts[0]
    shape = (shape[0], 1, *shape[1:]) if item.depthwise else shape
    return shape[::-1] if item.transposed else shape


def stored_type(checkpoint: CheckpointFolder) -> torch.dtype:
    """bfloat16 if all weights outside quantized blocks are stored in it, else float32."""
    return torch.bfloat16 if checkpoint.tensors.types() == {"BF16"} else torch.float32
