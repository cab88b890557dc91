"""Loading models from checkpoint folders and saving them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from attn_core import ModelFamily, installed
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_core.models import LanguageModel, NamedMechanisms
from attn_core.states import dtype_name
from attn_schema.decoder import DecoderConfig
from attn_schema.device import AUTO
from attn_schema.engine import ModelImpl
from torch import nn

from attn_models.adapters.base import Layout, StateDictAdapter, inexpressible, needed
from attn_models.adapters.hf_config import adapter_config, refused_config, without_aliases
from attn_models.adapters.native import LANGUAGE, LAYOUTS, SOURCE, NativeAdapter, require_installed
from attn_models.adapters.registry import (
    decoder_adapter,
    installed_adapters,
    missing_packages,
    packages_of,
    unknown_family,
)
from attn_models.adapters.state_dict import (
    check_config_fits,
    fill_buffers,
    has_other_head,
    init_empty_weights,
    load_parameters,
    read_parameters,
    saved_parameters,
    stored_tensors,
    stored_type,
    without_collections,
)
from attn_models.attention import layer_attentions
from attn_models.decoder.decoder import Decoder
from attn_models.device import resolve_device, resolve_dtype
from attn_models.loading.route import goes_on, takes_route
from attn_models.quantization.block_tensor import stays_in_blocks, widen_parameters
from attn_models.quantization.kept import is_checked, keeping_weights, kept_folder
from attn_models.quantization.quantize import (
    can_quantize,
    join_projections,
    prepack_model,
    quantize_model,
    require_not_quantized,
    require_quantization,
)
from attn_models.sources.gguf_files import folder_at
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, Verify, read_folder, write_folder
from attn_models.weights.quantized_tensors import with_plain_weights
from attn_models.weights.safetensors_files import release_read_pages, warn_of_memory

PLACES = ("mechanism", "encoder", "decoder", "cross")
"""The fields of a config that name mechanisms."""
log = logging.getLogger(__name__)


Described = tuple[Any, Layout, Callable[[], Any]]


def build_from(checkpoint: CheckpointFolder, described: Described, dtype: torch.dtype) -> Any:
    """The model in a checkpoint folder, `described` by `described_model`; raises `CheckpointInvalid` naming what is
    damaged or does not fit."""
    model, layout, rebuild = described
    load_parameters(model, read_parameters(checkpoint, layout, saved_parameters(model), dtype))
    if type(model) is Decoder:
        _compute_constants(model, model.config, checkpoint.tensors.device)
    elif any(buffer.is_meta for buffer in model.buffers()):
        fill_buffers(model, rebuild(), checkpoint.tensors.device)
    return model


def described_model(checkpoint: CheckpointFolder) -> Described:
    """The model that the config of a folder describes, without memory, the layout of its tensors, and a function that
    builds another; raises the errors of `load_model` for the config."""
    config, build, layout = _config_and_build(checkpoint)
    with init_empty_weights():
        return build(config), layout, partial(build, config)


def _config_and_build(checkpoint: CheckpointFolder) -> tuple[Any, Callable[[Any], Any], Layout]:
    kind = checkpoint.config.get("model_type")
    if kind in LAYOUTS:
        family, config = _family_and_config(checkpoint)
        return config, family.build, NativeAdapter()
    adapter = decoder_adapter(kind, checkpoint.config.get("requires"))
    config = _configured(checkpoint, adapter)
    return config, adapter.build, adapter.layout(config)


def _family_and_config(checkpoint: CheckpointFolder) -> tuple[ModelFamily, Any]:
    """The installed family that a config.json in the native layout names, and the config of its model."""
    try:
        family, config = family_and_config(checkpoint.config)
        check_config_fits(checkpoint, config)
        return family, config
    except InvalidValue as error:
        raise refused_config(checkpoint.path / "config.json", error, checkpoint.config, {}) from error


def family_and_config(described: Mapping[str, Any]) -> tuple[ModelFamily, Any]:
    """The installed family that the keys of a config.json in the native layout name, and the config of its model.

    Raises `InvalidValue` for missing keys and bad values, `UnknownName` for a family or mechanism that is not
    installed, naming its package, and the errors of the family for its config.
    """
    values, name, requires = needed(described, "model"), needed(described, "family"), described.get("requires")
    if not isinstance(values, Mapping) or not isinstance(name, str):
        raise InvalidValue.of("model", values, "an object, with the name of its family under the key 'family'")
    for place in PLACES:
        if isinstance(values.get(place), str):
            require_installed(values[place], requires)
    family = _family_named(name, requires)
    return family, family.configure(values)


def config_of(folder: Path) -> Any:
    """The config of the model in a folder, without reading its weights; raises the errors of `load_model` for these."""
    return _config_and_build(read_folder(folder, verify="sizes"))[0]


def fresh_model(folder: Path) -> Any:
    """A new model with the config of the one in a folder and random weights; raises the errors of `config_of`."""
    config, build, _ = _config_and_build(read_folder(folder, verify="sizes"))
    return build(config)


def empty_model(folder: Path) -> Any:
    """A model with the config of the one in a folder and its weights on the meta device; raises as `config_of`."""
    return described_model(read_folder(folder, verify="sizes"))[0]


def _family_named(name: str, requires: object) -> ModelFamily:
    """The installed family `name`; raises `UnknownName`, with the package to install if `requires` names one."""
    known = installed().models
    try:
        return known.get(name)
    except UnknownName as error:
        named = unknown_family("family", name, known.names(), requires) if missing_packages(requires) else error
        raise named from error


def hf_config_of(model: Any) -> dict[str, Any]:
    """The config.json of a model in the native layout: its family, its fields and the packages that it requires."""
    registry, values = installed().mechanisms, model.config.plain()
    for place in PLACES:
        if place in values:
            values[place] = registry.full_name(values[place])
    family = family_of(model.config)
    owners = {registry.owner(values[place]) for place in PLACES if place in values} | {family.rpartition("/")[0]}
    layout = SOURCE if hasattr(model, "max_encoder_len") else LANGUAGE
    return {
        "architectures": [LAYOUTS[layout]],
        "model_type": layout,
        "family": family,
        "model": values,
        "requires": {name: version(name) for name in sorted(owners | {"attn-core", "attn-models"})},
    }


def installed_family_of(config: Any) -> str | None:
    """`distribution/name` of the installed family whose `Config` is the type of `config`; None if there is none."""
    registry = installed().models
    return next((registry.name_of(item) for item in registry if item.Config is type(config)), None)


def family_of(config: Any) -> str:
    """Like `installed_family_of`, but raises `Incompatible` if there is none."""
    found = installed_family_of(config)
    if found is None:
        raise Incompatible(f"no installed family (hook attn_models) has the `Config` {type(config).__name__}")
    return found


def adapter_of(config: Any) -> StateDictAdapter:
    """The installed adapter whose `Config` is the type of `config`; raises `Incompatible` if there is none."""
    for adapter in installed_adapters(StateDictAdapter).values():  # type: ignore[type-abstract]
        if adapter.Config is type(config):
            return adapter
    rule = "neither a family (hook attn_models) nor a layout (hook attn_adapters) that is installed has this `Config`"
    raise Incompatible(f"a model whose config is a {type(config).__name__} cannot be saved: {rule}")


FLOATS = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    """A model ready to run, with its tokenizer, config and the other contents of its folder.

    `model` is a `LanguageModel`, such as `Decoder`, and `config` the config of its family. `tokenizer` is None if the
    folder has none; it also renders conversations. `hf_config` is the content of config.json, and `generation` that of
    generation_config.json, empty if there is none. `parameters` is the number of parameters, whether packed or not;
    they are on `device`.
    """

    path: Path
    model: Any
    tokenizer: Tokenizer | None
    config: Any
    hf_config: dict[str, Any]
    generation: dict[str, Any]
    parameters: int
    device: torch.device

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """The mechanism of each attention layer, including cross-attention."""
        if isinstance(self.config, DecoderConfig):
            return tuple(self.config.choice(layer).mechanism for layer in range(self.config.num_layers))
        if isinstance(self.model, NamedMechanisms):
            return tuple(self.model.layer_mechanisms().values())
        return tuple(getattr(self.model, "mechanisms", ()))

    @property
    def family(self) -> str:
        """The name of the model's family."""
        if isinstance(self.config, DecoderConfig):
            return "decoder"
        if (named := getattr(self.config, "family", None)) is not None:
            return str(named)
        return (installed_family_of(self.config) or adapter_of(self.config).name).rpartition("/")[2]

    @property
    def max_encoder_len(self) -> int | None:
        """The longest source in tokens; None for a model without an encoder."""
        return getattr(self.model, "max_encoder_len", None)


@without_collections()
def load_model(
    folder: str | Path,
    dtype: str = AUTO,
    *,
    device: str = "cpu",
    verify: Verify = "hashes",
    quantization: str | None = None,
    prepare: Callable[[Any], object] | None = None,
    model_impl: ModelImpl = "auto",
) -> LoadedModel:
    """The model in a checkpoint folder or a GGUF file, on `device`, in evaluation mode, its weights as `dtype`.

    Names of devices and dtypes are those of `resolve_device` and `resolve_dtype`: `auto` is bfloat16 on a CUDA device
    that supports it, else float32. On the CPU, weights that already have that dtype stay in the file and are paged in
    when they are used; other devices receive them tensor by tensor. They equal those in the file bit for bit, outputs
    those of the saved model up to rounding, as products depend on the addresses of tensors. `verify` says how the
    folder is checked against its manifest, if it has one. `prepare` is called with the model before its weights are
    packed, to change it in place; with it no weights stay in stored blocks.

    `quantization`, one of `attn_core.kernels.linear.QUANTIZATIONS`, packs the weights of linear layers for serving;
    everything else is computed in `dtype` (see `quantize_model`). `auto` on a CPU packs a float32 model in the format
    in which its weights are stored, blocks included (see `prepack_model`). On a CUDA device it joins layers that read
    the same input, and keeps stored blocks, FP8 included, if a kernel multiplies them in `dtype` (see
    `join_projections`). None means `none`. `model_impl`: `native` layouts, `transformers`, or it where no layout can.

    Raises `CheckpointInvalid` for a folder that is damaged, hostile or does not fit the model, naming tensors that
    are missing, extra or misshaped; `UnknownName` for an unknown layout or mechanism; `InvalidValue` for a device that
    is not available, and a dtype or `quantization` that it does not support; `OutOfCapacity` if its memory is too
    small; with `quantization`, the errors of `quantize_model`; for a GGUF file, those of `folder_of_gguf`.
    """
    place = resolve_device(device)
    if (name := dtype_name(resolve_dtype(dtype, place))) not in FLOATS:
        raise InvalidValue.of("dtype", dtype, ", ".join(FLOATS))
    require_quantization(quantization, place.type)
    path = folder_at(folder)
    kept = kept_folder(path) if prepare is None and place.type == "cpu" else None
    files = read_folder(path, verify=verify, nonfinite="allow" if is_checked(kept) else "refuse", device=place)
    if place.type == "cpu":
        warn_of_memory(files.path)
    through = partial(_through_transformers, files, name, quantization, prepare)
    if takes_route(files.config, model_impl):
        return through()
    checkpoint = with_plain_weights(files, in_blocks=not prepare and stays_in_blocks(quantization, name, place.type))
    try:
        described = described_model(checkpoint)
    except (CheckpointInvalid, Incompatible) as refusal:
        with goes_on(files, refusal, model_impl) as why:
            log.warning("%s: transformers builds it, as %s", path, why)
            return through()
    joined = quantization == "auto" and place.type == "cuda"
    if quantization == "none" or (quantization == "auto" and (name != "float32" or place.type != "cpu")):
        quantization = None
    # Packing reads each weight once, from the file and in its stored dtype.
    read_as = getattr(torch, name) if quantization is None else stored_type(checkpoint)
    model = build_from(checkpoint, described, read_as)
    count = sum(parameter.numel() for parameter in model.parameters())
    if prepare is not None:
        prepare(model)
    # Packing leaves the interpreter free.
    with keeping_weights(kept, checkpoint.tensors), ThreadPoolExecutor(1) as beside:
        tokenizer = beside.submit(_tokenizer, checkpoint, model)
        if quantization == "auto":
            prepack_model(model, read_as)
            release_read_pages(checkpoint.path)
        elif quantization is not None:
            quantize_model(model, quantization, getattr(torch, name))
        elif joined and can_quantize(model):
            join_projections(model, read_as)
        widen_parameters(model, getattr(torch, name))
    return _loaded(checkpoint, model, count, tokenizer.result())


def _through_transformers(
    checkpoint: CheckpointFolder, dtype: str, quantization: str | None, prepare: Callable[[Any], object] | None
) -> LoadedModel:
    from attn_models.hf.loading import load_through_transformers

    model, count = load_through_transformers(checkpoint, dtype, quantization, prepare)
    return _loaded(checkpoint, model, count, _tokenizer(checkpoint, model))


def _tokenizer(checkpoint: CheckpointFolder, model: Any) -> Tokenizer | None:
    """The tokenizer of a folder, which must fit the model's embedding; None if it has none."""
    return Tokenizer.from_folder(checkpoint.path, model.vocab_size) if checkpoint.tokenizer else None


def _loaded(checkpoint: CheckpointFolder, model: Any, count: int, tokenizer: Tokenizer | None) -> LoadedModel:
    """A model with the other contents of its folder."""
    return LoadedModel(
        path=checkpoint.path,
        model=model.eval(),
        tokenizer=tokenizer,
        config=model.config,
        hf_config=checkpoint.config,
        generation=checkpoint.generation_config,
        parameters=count,
        device=torch.device(checkpoint.tensors.device),
    )


def save_model(
    folder: str | Path,
    model: Any,
    tokenizer: Tokenizer | None = None,
    *,
    layout: str | None = None,
    generation: dict[str, Any] | None = None,
    base: LoadedModel | None = None,
) -> Path:
    """Write a model as a checkpoint folder, which replaces an existing one; it is written completely or not at all.

    `model` is a `Decoder` or a model of another family. `layout` is the `model_type` to write. For a decoder the
    default is the native layout, which can express every config; layouts such as "llama" and "gpt2" can be read by
    other programs too. For a model of a plugin it is that of its adapter, and config.json names the plugin's package.
    Parameters that modules share are written once.

    `base` is the model that this one was made from: what its config.json says and the layout does not write, such as
    the ids of special tokens, is kept, and so are its generation_config.json and the files that describe how it reads
    images. Without it, config.json has the ids of the tokenizer's special tokens.

    Raises `Incompatible` for a model that the layout cannot express, `InvalidValue` for weights that are not finite,
    `CheckpointWriteFailed` for errors of the file system, `WrongState` for a model whose weights are packed.
    """
    described, tensors = in_layout(model, layout)
    ids = {} if tokenizer is None else tokenizer.config_ids()
    described = ids | described if base is None else _kept(base.hf_config, described)
    files: dict[str, Any] = dict(tokenizer.files()) if tokenizer else {}
    if base is not None:
        from attn_models.loading.images import processor_files

        files, generation = files | processor_files(base.path), generation or base.generation
    if generation:
        files["generation_config.json"] = generation
    return write_folder(folder, described, tensors, files)


def in_layout(model: Any, layout: str | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the tensors of a model in a layout, by default its own; raises as `save_model`."""
    require_not_quantized(model, "weights packed as {} cannot be written; load the model without packing")
    own, parameters = type(model) is Decoder, saved_parameters(model)
    if not own and type(model.config) is DecoderConfig:
        rule = "its folder would be read as a Decoder; its layout needs a subclass of DecoderConfig as its `Config`"
        raise Incompatible(f"a {type(model).__name__} with a DecoderConfig cannot be saved: {rule}")
    if layout is None and not own and installed_family_of(model.config) is not None:
        described, tensors = hf_config_of(model), parameters
    else:
        native = NativeAdapter.model_type if own else adapter_of(model.config).model_type
        adapter = decoder_adapter(layout or native)
        if not isinstance(model.config, adapter.Config):
            given = type(model.config).__name__
            raise Incompatible(f"a model whose config is a {given} cannot be expressed in a {layout} config.json")
        if own and model.config.kv_sharing and adapter.model_type != NativeAdapter.model_type:
            raise inexpressible({"kv_sharing": model.config.kv_sharing}, adapter.model_type)
        described = adapter.to_hf_config(model.config) | packages_of(adapter)
        if adapter.model_type != native:
            _require_same_parameters(adapter, described, parameters)
        tensors = stored_tensors(parameters, adapter.layout(model.config))
    return described | {"dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}, tensors


OF_WEIGHTS = {"architectures", "dtype", "torch_dtype", "quantization_config", "compression_config"}
"""Keys of config.json that say which weights there are, and how they are stored."""


def _kept(base: Mapping[str, Any], described: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json `described` with what `base` says, as far as that leaves the described model as it is; of another
    layout or a family without one, only the ids of special tokens."""
    said = {key: value for key, value in base.items() if key not in OF_WEIGHTS}
    layout = described.get("model_type")
    if layout in LAYOUTS or base.get("model_type") != layout:
        return {key: value for key, value in said.items() if key.endswith("_token_id")} | dict(described)
    adapter = decoder_adapter(layout, described.get("requires"))
    said = without_aliases(said, adapter.aliases)
    if adapter.from_hf_config({**described, **said}) == adapter.from_hf_config(described):
        return {**described, **said}
    return {key: value for key, value in said.items() if key not in adapter.known_keys} | dict(described)


def _require_same_parameters(
    adapter: StateDictAdapter, described: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Raise `Incompatible`, naming a parameter, unless a model with this config.json has the same parameter shapes."""
    with init_empty_weights():
        config = adapter.from_hf_config(described)
        tensors = [stored.name for stored in adapter.layout(config).stored(parameters)]
        read = saved_parameters(adapter.build(adapter.without_missing(config, tensors)))
    shapes = [{name: tuple(tensor.shape) for name, tensor in each.items()} for each in (parameters, read)]
    changed = sorted(dict(shapes[0].items() ^ shapes[1].items()))
    if changed:
        name = changed[0]
        message = f"the parameter {name!r} cannot be expressed in a {adapter.model_type} folder"
        raise Incompatible(f"{message}: the model of that layout lacks it, or has another shape for it", parameter=name)


def _configured(checkpoint: CheckpointFolder, adapter: StateDictAdapter) -> Any:
    """The config in a checkpoint folder, checked against the sizes of its tensors before any model is built.

    Raises `CheckpointInvalid` for a config that is invalid or larger than the folder's tensors.
    """
    path = checkpoint.path / "config.json"
    try:
        config = adapter.without_missing(adapter_config(adapter, checkpoint.config, path), checkpoint.tensors.entries)
        check_config_fits(checkpoint, config)
        if isinstance(config, DecoderConfig):
            layer_attentions(config)
            config = _with_own_head(checkpoint, adapter, config)
    except InvalidValue as error:
        raise refused_config(path, error, checkpoint.config, adapter.keys) from error
    return config


def _with_own_head(checkpoint: CheckpointFolder, adapter: StateDictAdapter, config: DecoderConfig) -> DecoderConfig:
    """The config, untied if the checkpoint's unembedding is not its embedding: like transformers, which keeps both."""
    embedding = adapter.layout(config).tensor_mappings([adapter.embedding])
    if not config.tie_word_embeddings or not has_other_head(checkpoint, adapter, embedding):
        return config
    log.warning("%s: tie_word_embeddings is true, but %r is another tensor: kept", checkpoint.path, adapter.head)
    return dataclasses.replace(config, tie_word_embeddings=False)


def _compute_constants(model: Decoder, config: DecoderConfig, device: torch.device | str) -> None:
    """Compute the buffers that are not stored in checkpoints, such as tables of rotary angles, on `device`."""
    pending = {name for name, buffer in model.named_buffers() if buffer.is_meta}
    if not pending:
        return
    attentions = layer_attentions(config)
    places = {f"blocks.{index}.attention.": attention for index, attention in enumerate(attentions)}
    later = {f"predictors.{index}.block.attention.": attentions[-1] for index in range(config.num_nextn_predict_layers)}
    fresh: dict[int, nn.Module] = {}
    for prefix, attention in (places | later).items():
        if id(attention) not in fresh:
            fresh[id(attention)] = attention.mechanism.build(attention.config)
        for name, buffer in fresh[id(attention)].named_buffers():
            if prefix + name in pending:
                owner, _, leaf = (prefix + name).rpartition(".")
                model.get_submodule(owner).register_buffer(leaf, buffer.to(device), persistent=False)


def load_draft(folder: Path, served: LoadedModel, dtype: str = AUTO, quantization: str = "auto") -> LanguageModel:
    """Load the draft model in `folder` for speculative decoding with the model `served`, on the device of `served`.

    Raises `Incompatible` if its vocabulary differs from that of `served`, or if it has an encoder, and the errors of
    `load_model`.
    """
    draft = load_model(folder, dtype, device=str(served.device), quantization=quantization)
    if draft.max_encoder_len is not None:
        raise Incompatible(f"draft {folder}: it has an encoder; a draft must be a decoder without one", field="draft")
    theirs, ours = draft.tokenizer, served.tokenizer
    if theirs is None or ours is None or draft.model.vocab_size != served.model.vocab_size:
        rule = f"its vocabulary has {draft.model.vocab_size} tokens, that of the model {served.model.vocab_size}"
        raise Incompatible(f"draft {folder}: {rule}", field="draft")
    for token in range(min(theirs.vocab_size, ours.vocab_size)):
        if theirs.token_bytes(token) != ours.token_bytes(token):
            raise Incompatible(f"draft {folder}: token {token} differs from that of the model", field="draft")
    model: LanguageModel = draft.model
    return model
