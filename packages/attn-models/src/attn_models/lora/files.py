"""Reads and writes adapters as folders in PEFT's format: adapter_config.json and adapter_model.safetensors; reads those
in GGUF files too."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from torch import Tensor

from attn_models.adapters.base import Layout
from attn_models.adapters.native import LAYOUTS
from attn_models.adapters.registry import decoder_adapter
from attn_models.adapters.state_dict import init_empty_weights, joined_parts, split_parts
from attn_models.decoder.decoder import Decoder
from attn_models.lora.adapter import LoraAdapter, require_fits
from attn_models.lora.experts import is_parameter, parameter_of, peft_names, shares, stack, stacked_experts, unstack
from attn_models.lora.layer import LoraLayer
from attn_models.lora.peft_config import ADAPTER_CONFIG_NAME, CONFIG_LIMIT, AdapterConfig, adapter_config_of, base_of
from attn_models.lora.sites import WEIGHT, StoredModule, stored_modules
from attn_models.lora.tables import EMBEDDING, TABLES, UNEMBEDDING, TableChange, TableRows, is_tied, table_of
from attn_models.weights import LazyTensors, read_manifest, staged_folder, verify_manifest
from attn_models.weights.gguf_adapter import read_gguf_factors
from attn_models.weights.manifest import MANIFEST_LIMIT, MANIFEST_NAME, file_sha256
from attn_models.weights.safe_files import read_config, read_json_object
from attn_models.weights.safetensors_files import read_header, require_floats, weight_files

ADAPTER_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDED, TOKENS = ("lora_embedding_A", "lora_embedding_B"), "token_adapter.trainable_tokens_delta"
"""Those of an embedding, transposed, and of rows in place of those of a table."""
BASE, BASE_SHA256 = "base_model", "base_sha256"
"""Keys in the manifest of an adapter's folder that identify its base."""


def weights_sha256(folder: Path) -> str:
    """The hash of the weights of a model folder: SHA-256 of the SHA-256s of its weight files, sorted by name."""
    records = read_manifest(folder) or {}
    total = hashlib.sha256()
    for path in sorted(weight_files(folder)):
        known = records.get(path.name)
        total.update((known.sha256 if known else file_sha256(path)).encode())
    return total.hexdigest()


def layout_of(folder: Path) -> Layout | None:
    """The layout, which names the tensors, of the model in `folder`; None for one of the native layouts."""
    model_type = read_config(folder / "config.json").get("model_type")
    return None if model_type in LAYOUTS else decoder_adapter(model_type)


def modules_of(model: Any, folder: Path) -> dict[str, tuple[str, ...]]:
    """The names of the model's linear layers and tables in its folder's checkpoint, and last that which PEFT has, by
    the model's own names."""
    modules = _modules(model, folder)
    known = stacked_experts(modules)
    called = {part: parameter_of(one, known) or one.name for one in known for part in one.parts}
    found = {part: (module.name, called[part]) for module in modules for part in module.parts}
    return found | {name: (stored,) for name, stored in table_names(model, folder).items()}


def table_names(model: Any, folder: Path) -> dict[str, str]:
    """The names of a decoder's embedding and unembedding in its folder's checkpoint, and in PEFT."""
    if not isinstance(model, Decoder):
        return {}
    layout, parameters = _layout(model, folder), {f"{name}.weight": name for name in TABLES}
    if layout is None:
        return {name: name for name in TABLES}
    with init_empty_weights():
        items = layout.tensor_mappings([*Decoder(model.config).state_dict(), *parameters])
    return {parameters[item.parameters[0]]: item.name.removesuffix(".weight") for item in items
            if item.parameters[0] in parameters}  # fmt: skip


def _layout(model: Any, folder: Path) -> Layout | None:
    layout = layout_of(folder)
    depends = getattr(layout, "layout", None)
    return depends(model.config) if depends is not None else layout


def _modules(model: Any, folder: Path) -> list[StoredModule]:
    return stored_modules(model, _layout(model, folder))


def require_writable(adapter: LoraAdapter, model: Any, base: Path) -> None:
    """Raise `InvalidValue`, naming the field, for an adapter that `write_adapter` would refuse whatever its weights."""
    _adapted(adapter, model, base)


def _adapted(adapter: LoraAdapter, model: Any, base: Path) -> tuple[list[StoredModule], dict[str, str]]:
    """What the adapter changes, as PEFT has it, and by the names of these modules the parameters among them."""
    known = stacked_experts(_modules(model, base))
    modules = [module for module in known if any(adapter.of(part) is not None for part in module.parts)]
    parameters = {module.name: name for module in modules if (name := parameter_of(module, known)) is not None}
    if parameters and adapter.config.use_dora:
        raise InvalidValue.of("use_dora", f"true for {next(iter(parameters))}", "false: PEFT has no DoRA of experts")
    return modules, parameters


def write_adapter(target: Path, adapter: LoraAdapter, model: Any, base: Path) -> Path:
    """Write an adapter of the model in the folder `base` as a folder, which replaces an existing one.

    Layers that are stored as one in the base's checkpoint, such as fused projections, are written as one, with a rank
    that is large enough for all; experts are written as PEFT has them (see `attn_models.lora.experts`). Raises
    `CheckpointWriteFailed` for errors of the file system, `InvalidValue` for weights that are not finite and for DoRA
    of experts, which PEFT does not have.
    """
    from safetensors.torch import save_file

    modules, parameters = _adapted(adapter, model, base)
    # Patterns are written anew, by the ranks that the layers have.
    plain = dataclasses.replace(
        adapter.config, rank_pattern={}, alpha_pattern={}, modules_to_save=(), trainable_token_indices=()
    )
    tensors, plain, ranks, tables = _of_tables(adapter, plain, table_names(model, base), tied=is_tied(model))
    scale = plain.scaling("")
    for place, module in peft_names(modules).items():
        layers = [adapter.of(part) for part in module.parts]
        a, b, magnitude = _stacked(module, layers, scale) if module.experts else _joined(module, layers, scale)
        rank = len(a) // (module.experts or 1)
        if rank != plain.r:
            ranks[parameters.get(module.name, module.name)] = rank
        named = {DOWN: a, UP: b} | ({} if magnitude is None else {MAGNITUDE: magnitude})
        tensors |= {f"{PREFIX}{place}.{leaf}": tensor for leaf, tensor in named.items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise InvalidValue.of(f"tensors[{name!r}]", "NaN or infinity", "finite values")
    # Stacks by whole names, as the others of their modules decide how they are nested; weights by the ends of theirs.
    stacks = {module.name for module in modules if module.experts}
    direct = {name if name in ranks or name in stacks else _end(name) for name in parameters.values()}
    config = dataclasses.replace(_with_ranks(plain, ranks), target_parameters=tuple(sorted(direct)))
    origin = {BASE: config.base_model, BASE_SHA256: config.base_sha256}
    with staged_folder(target, {key: value for key, value in origin.items() if value}) as stage:
        linear = [module.name for module in modules if module.name not in parameters]
        targets = {name if name in ranks else name.rpartition(".")[2] for name in (*linear, *tables)}
        (stage / ADAPTER_CONFIG_NAME).write_text(json.dumps(config.to_json(targets), indent=2) + "\n", encoding="utf-8")
        ready = {name: tensor.detach().cpu().float().contiguous() for name, tensor in tensors.items()}
        save_file(ready, stage / ADAPTER_NAME, metadata={"format": "pt"})
    return target


def _of_tables(
    adapter: LoraAdapter, config: AdapterConfig, names: Mapping[str, str], *, tied: bool
) -> tuple[dict[str, Tensor], AdapterConfig, dict[str, int], list[str]]:
    """PEFT's tensors for the changed tables, the config that names them, and the ranks and names of those that are
    LoRA's."""
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    lora = list[str]()
    for name in adapter.tables:
        change, stored = adapter.table(name), names[name]
        place, fields = f"{PREFIX}{stored}.", dict[str, Any]()
        if isinstance(change, LoraLayer):
            a, b = change.a, change.b * (change.scaling / config.scaling(""))
            factors = {EMBEDDED[0]: b.T, EMBEDDED[1]: a.T} if name == EMBEDDING else {DOWN: a, UP: b}
            tensors |= {place + leaf: factor for leaf, factor in factors.items()}
            lora.append(stored)
            ranks |= {stored: len(a)} if len(a) != config.r else {}
        elif change.ids is None:
            tensors[f"{place}weight"] = change.rows.clone()
            fields["modules_to_save"] = (*config.modules_to_save, stored.rpartition(".")[2])
        elif name == EMBEDDING:
            tensors[place + TOKENS] = change.rows
            fields["trainable_token_indices"] = tuple(change.ids.tolist())
        config = dataclasses.replace(config, **fields)
    both = tied and len(adapter.tables) > 1 and not config.trainable_token_indices
    return tensors, dataclasses.replace(config, ensure_weight_tying=both), ranks, lora


def _end(parameter: str) -> str:
    """The name of a weight from that of its layer on, as transformers may have other names for what contains it."""
    return ".".join(parameter.split(".")[-2:])


def _with_ranks(config: AdapterConfig, ranks: Mapping[str, int]) -> AdapterConfig:
    """The config with these `ranks` by layer, and values of alpha for which the layers keep their scale."""
    scale = config.scaling("")

    def alpha(rank: int) -> float:
        return scale * (rank**0.5 if config.use_rslora else rank)

    alphas = {name: alpha(rank) for name, rank in ranks.items()}
    return dataclasses.replace(config, rank_pattern=dict(ranks), alpha_pattern=alphas)


def _stacked(module: StoredModule, layers: Sequence[LoraLayer | None], scale: float) -> tuple[Tensor, Tensor, None]:
    """PEFT's A and B for a stack of experts; an expert without adapter layers adds zeros."""
    each, (first, *_) = len(module.sizes), [layer for layer in layers if layer is not None]
    nothing = first.a.new_zeros(0, first.a.shape[1]), first.b.new_zeros(sum(module.sizes), 0)
    factors = []
    for place, share in enumerate(shares(module)):
        own = layers[place * each : (place + 1) * each]
        factors.append(_joined(share, own, scale)[:2] if any(layer is not None for layer in own) else nothing)
    return *stack(module, factors), None


def _joined(
    module: StoredModule, layers: Sequence[LoraLayer | None], scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B, for the scale of the product, and magnitudes for a layer of the checkpoint, joined from the adapter layers
    of its parts; a part without an adapter layer (None) adds zeros."""
    present = [layer for layer in layers if layer is not None]
    shared = all(torch.equal(layer.a, present[0].a) for layer in present)
    a = present[0].a if shared else torch.cat([layer.a for layer in present])
    rows, column = [], 0
    for layer, size in zip(layers, module.sizes, strict=True):
        up = a.new_zeros(size, len(a))
        if layer is not None:
            start = 0 if shared else column
            up[:, start : start + len(layer.a)] = layer.b * (layer.scaling / scale / module.scale)
            column += len(layer.a)
        rows.append(up)
    magnitudes = [None if layer is None else layer.magnitude for layer in layers]
    if any(magnitude is None for magnitude in magnitudes):
        return a, joined_parts(rows, module.groups), None
    whole = joined_parts([cast("Tensor", m)[:, None] / abs(module.scale) for m in magnitudes], module.groups)
    return a, joined_parts(rows, module.groups), whole[:, 0]


def read_adapter(source: Path, model: Any, base: Path, key: str = "") -> LoraAdapter:
    """The adapter in a folder or a GGUF file, for `model`, which was loaded from the folder `base`; in evaluation mode.

    Raises `CheckpointInvalid` for a source that is damaged or uses an unsupported feature, which the message names;
    `Incompatible` for an adapter of another base: one with other weights, if the adapter records their hash, or with
    layers that the model lacks.
    """
    config, layers, tables = (_read_gguf if source.is_file() else _read_folder)(source, model, base)
    if not layers and not tables:
        raise CheckpointInvalid.of(source, "holds no tensors")
    adapter = LoraAdapter(config, layers, key, tables)
    try:
        require_fits(adapter, model)
    except InvalidValue as error:
        raise Incompatible(f"adapter {source.name}: made for another base: {error.message}", field="adapter") from error
    return adapter.to(next(model.parameters()).device).eval().requires_grad_(requires_grad=False)


_Read = tuple[AdapterConfig, dict[str, LoraLayer], dict[str, TableChange]]
"""The config of an adapter, its layers by the model's names, and its changes of tables."""


def _read_folder(folder: Path, model: Any, base: Path) -> _Read:
    records = read_manifest(folder)
    source = read_json_object(folder / MANIFEST_NAME, MANIFEST_LIMIT).get("source", {}) if records is not None else {}
    if records is not None:
        verify_manifest(folder, records)
    path, weights = folder / ADAPTER_CONFIG_NAME, folder / ADAPTER_NAME
    for file in (path, weights):
        if not file.is_file():
            raise CheckpointInvalid.of(file, "is missing")
    noted = source.get(BASE_SHA256, "") if isinstance(source, Mapping) else ""
    config = adapter_config_of(read_json_object(path, CONFIG_LIMIT), path, str(noted))
    if noted and noted != weights_sha256(base):
        known = config.base_model or "another"
        message = f"adapter {folder.name}: its base is {known}, whose weights are not those of {base.name}"
        raise Incompatible(message, field="adapter", base=config.base_model)
    entries = read_header(weights)
    require_floats(weights, entries, entries)
    tensors = LazyTensors({weights: entries})
    read = {name: tensors[name] for name in tensors}
    tables = _tables(weights, read, config, model, table_names(model, base))
    return config, _layers(weights, read, config, _modules(model, base)), tables


def _read_gguf(file: Path, model: Any, base: Path) -> _Read:
    modules = {f"{module.name}{WEIGHT}": module for module in _modules(model, base)}
    names = {f"{stored}{WEIGHT}": name for name, stored in table_names(model, base).items()}
    layers, tables = dict[str, LoraLayer](), dict[str, TableChange]()
    for name, found in read_gguf_factors(file, read_config(base / "config.json")).items():
        a, b = (torch.tensor(factor) for factor in (found.a, found.b))
        if name in names:
            tables[names[name]] = LoraLayer(a, b, found.scaling)
        elif name in modules:
            layers |= _split(modules[name], {DOWN: a, UP: b}, found.scaling)
        else:
            raise Incompatible(
                f"adapter: it changes {name!r}, which is not a linear layer of the model", field="adapter"
            )
    first = next((layer for layer in (*layers.values(), *tables.values()) if isinstance(layer, LoraLayer)), None)
    rank = 1 if first is None else len(first.a)
    scale = 1.0 if first is None else first.scaling
    return AdapterConfig(r=rank, lora_alpha=scale * rank, base_model=base_of(file)), layers, tables


def _layers(
    path: Path, tensors: Mapping[str, Tensor], config: AdapterConfig, modules: Sequence[StoredModule]
) -> dict[str, LoraLayer]:
    """The adapter layers, by the model's own layer names, from the tensors of a file; raises `CheckpointInvalid` or
    `Incompatible` with the name of the tensor or layer that does not fit."""
    stacks = [
        one for one in stacked_experts(modules) if one.experts and is_parameter(one.name, config.target_parameters)
    ]
    by_name = peft_names([*(module for module in modules if not module.experts), *stacks])
    leaves = (DOWN, UP, *([MAGNITUDE] if config.use_dora else []))
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place = name.removeprefix(PREFIX)
        leaf = next((leaf for leaf in leaves if place.endswith("." + leaf)), None)
        if leaf is None:
            raise CheckpointInvalid.of(
                path, f"tensor {name!r} does not belong to a {'DoRA' if config.use_dora else 'LoRA'} adapter"
            )
        found.setdefault(place.removesuffix("." + leaf), {})[leaf] = tensor.float()
    layers: dict[str, LoraLayer] = {}
    for name, parts in found.items():
        if name not in by_name:
            raise Incompatible(
                f"adapter: it changes the linear layer {name!r}, which the model does not have", field="adapter"
            )
        for leaf in leaves:
            if leaf not in parts:
                raise CheckpointInvalid.of(path, f"tensor '{PREFIX}{name}.{leaf}' is missing")
        module = by_name[name]
        weight = module.name if module.experts else f"{name}.weight"
        called = weight if is_parameter(weight, config.target_parameters) else name
        _require_shapes(path, name, parts, config.rank(called) * (module.experts or 1))
        if not module.experts:
            layers |= _split(module, parts, config.scaling(called))
            continue
        for share, (a, b) in zip(shares(module), unstack(module, parts[DOWN], parts[UP]), strict=True):
            layers |= _split(share, {DOWN: a, UP: b}, config.scaling(called))
    return layers


def _tables(
    path: Path, tensors: dict[str, Tensor], config: AdapterConfig, model: Any, names: Mapping[str, str]
) -> dict[str, TableChange]:
    """The changes of tables, whose tensors are taken out of `tensors`."""
    found: dict[str, TableChange] = {}
    for name, stored in names.items():
        place = f"{PREFIX}{stored}."
        own = {key.removeprefix(place): tensors.pop(key).float() for key in list(tensors) if key.startswith(place)}
        # PEFT saves the base's own table with its LoRA.
        if (base := own.pop("base_layer.weight", None)) is not None and not torch.equal(
            base, table_of(model, name).float()
        ):
            raise Incompatible(f"adapter: {stored} is another one than its base has", field="adapter")
        a, b = (own.pop(DOWN, None), own.pop(UP, None)) if name == UNEMBEDDING else map(own.pop, EMBEDDED, (None, None))
        if a is not None and b is not None:
            down, up = (a, b) if name == UNEMBEDDING else (b.T.contiguous(), a.T.contiguous())
            _require_shapes(path, stored, {DOWN: down, UP: up}, config.rank(stored))
            found[name] = LoraLayer(down, up, config.scaling(stored))
        elif "weight" in own:
            found[name] = TableRows(own.pop("weight"))
        elif name == EMBEDDING and TOKENS in own and config.trainable_token_indices:
            rows = TableRows(own.pop(TOKENS), config.trainable_token_indices)
            found |= dict.fromkeys(TABLES if is_tied(model) else (name,), rows)
        if own:
            raise CheckpointInvalid.of(path, f"tensor '{place}{next(iter(own))}' does not belong to a LoRA adapter")
    ends = {names[name].rpartition(".")[2] for name, change in found.items() if isinstance(change, TableRows)}
    missing = sorted({saved.rpartition(".")[2] for saved in config.modules_to_save} - ends)
    if missing or (config.trainable_token_indices and not found):
        raise CheckpointInvalid.of(path, f"modules_to_save: {', '.join(missing) or TOKENS} is missing")
    return found


def _require_shapes(path: Path, name: str, parts: Mapping[str, Tensor], rank: int) -> None:
    a, b = parts[DOWN], parts[UP]
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise CheckpointInvalid.of(path, f"{name}: A {list(a.shape)} and B {list(b.shape)} are not of rank {rank}")
    if MAGNITUDE in parts and parts[MAGNITUDE].numel() != len(b):
        raise CheckpointInvalid.of(path, f"{name}: {parts[MAGNITUDE].numel()} magnitudes for {len(b)} outputs")


def _split(module: StoredModule, parts: Mapping[str, Tensor], scaling: float) -> dict[str, LoraLayer]:
    sizes, magnitude = list(module.sizes), parts.get(MAGNITUDE)
    if len(parts[UP]) != sum(sizes):
        message = f"adapter: {module.name} has {len(parts[UP])} outputs in its base, {sum(sizes)} in the model"
        raise Incompatible(message, field="adapter")
    ups = split_parts(parts[UP] * module.scale, sizes, module.groups)
    magnitudes: Sequence[Tensor | None] = [None] * len(sizes)
    if magnitude is not None:
        whole = (magnitude.reshape(-1, 1) * abs(module.scale)).contiguous()
        magnitudes = [part[:, 0] for part in split_parts(whole, sizes, module.groups)]
    return {
        part: LoraLayer(parts[DOWN].clone(), up.contiguous(), scaling, own)
        for part, up, own in zip(module.parts, ups, magnitudes, strict=True)
    }
