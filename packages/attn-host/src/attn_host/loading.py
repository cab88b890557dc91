"""What a host needs of a model folder: where it is, its kernels, its KV cache and its draft model."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
from attn_core import CacheFamily
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_core.models import LanguageModel
from attn_core.stores import StoreSize
from attn_engine import Draft
from attn_models.loading import LoadedModel, load_draft
from attn_schema import EngineConfig
from attn_schema.home import models_folder


def find_folder(source: str, home: Path) -> Path:
    """The model folder for an absolute path or a name under the home's models.

    Raises `UnknownName` with near names, or `CheckpointInvalid` for a path that is no model folder.
    """
    given = Path(source).expanduser()
    if given.is_absolute():
        if not (given / "config.json").is_file():
            raise CheckpointInvalid.of(given, "is not a model folder: it has no config.json")
        return given
    folder = models_folder(home)
    known = sorted(path.parent.name for path in folder.glob("*/config.json"))
    if source not in known:
        raise UnknownName.of("model", source, known)
    return folder / source


def stored_as(config: EngineConfig) -> str:
    """The engine's `quantization` as `attn_models.load_model` calls it."""
    return "unpacked" if config.quantization == "none" else config.quantization


def quantization_of(model: Any) -> str:
    """How the weights of a model's linear layers are stored; "none" if they are as loaded."""
    return getattr(model, "weights", None) or "none"


def use_kernel(model: Any, name: str | None) -> None:
    """Compute all attention with the kernel called `name`; None lets dispatch choose.

    Runs one token, after an encoder input of maximum length if the model reads one, so that a kernel that refuses
    raises `KernelRefused` here and not in the first request.
    """
    if name is not None:
        choosers = [getattr(module, "use_kernel", None) for module in model.modules()]
        chosen = [choose for choose in choosers if choose is not None]
        if not chosen:
            raise Incompatible("no attention of this model is computed by kernels", kernel=name)
        for choose in chosen:
            choose(name)
        if hasattr(model, "take_apart"):
            model.take_apart()  # a kernel of whole blocks has an attention of its own
    with torch.inference_mode():
        one = torch.zeros(1, 1, dtype=torch.int64)
        # Of maximum length: images are no other number of tokens.
        longest = getattr(model, "source_context", None)
        model(one) if longest is None else model(one, one.expand(1, longest))


def kv_cache_size(model: LanguageModel, family: CacheFamily, config: EngineConfig) -> StoreSize:
    """The largest KV cache within `kv_cache_memory_bytes`, but no larger than `max_num_seqs` sequences need.

    Raises `InvalidValue` if the memory would not hold one token of one request.
    """
    sequences, allowed = config.max_num_seqs, config.kv_cache_memory_bytes
    specs = model.state_specs()
    # Every request may come with an encoder input of maximum length.
    longest = getattr(model, "source_context", 0)
    empty, full = (family.bytes(specs, tokens=0, source=source, dtype=config.dtype) for source in (0, longest))

    def sized(tokens: int) -> StoreSize:
        return StoreSize(tokens=tokens, requests=sequences, dtype=config.dtype, device=config.device)

    def memory(tokens: int) -> int:
        return family.room(specs, sized(tokens)) + sequences * (full - empty)

    tokens = bisect_right(range(1, sequences * model.context + 1), allowed, key=memory)
    if tokens < 1:
        raise InvalidValue.of("kv_cache_memory_bytes", allowed, f"at least {memory(1)}, for {sequences} sequences")
    return sized(tokens)


def draft_model(served: LoadedModel, family: CacheFamily, config: EngineConfig) -> Draft | None:
    """The draft model of the config with a KV cache of its own, as large as that of the served model may be.

    Raises `Incompatible` for a model of another vocabulary.
    """
    if config.draft_model is None:
        return None
    model = load_draft(Path(config.draft_model), served, config.dtype, stored_as(config))
    store = family.create(model.state_specs(), kv_cache_size(model, family, config))
    return Draft(model, store, config.max_num_batched_tokens)
