"""Builds an engine from a model and a config, with a KV cache as large as the configured memory allows."""

from __future__ import annotations

from bisect import bisect_right

from attn_core import CacheFamily, installed
from attn_core.errors import InvalidValue
from attn_core.models import BatchInvariant, LanguageModel, Tokenizer
from attn_core.stores import StateStore, StoreSize
from attn_schema import EngineConfig
from attn_schema.engine import KV_CACHE_BYTES
from torch.nn import Module

from attn_engine.draft_model import DraftModel
from attn_engine.engine import Engine
from attn_engine.speculative import AdaptivePromptLookup, PromptLookupProposer
from attn_engine.tensor_parallel import Leader

SUMMED_IN_ORDER = {"float32", "bfloat16"}
"""Forms of packed weights whose products are the same as those of unpacked ones."""


def build_engine(
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    config: EngineConfig = EngineConfig(),  # noqa: B008  (frozen)
    *,
    kv_cache_tokens: int | None = None,
    draft_model: LanguageModel | None = None,
    ranks: Leader | None = None,
) -> Engine:
    """Build an engine with a new KV cache of the installed family `config.kv_cache`.

    The cache holds `kv_cache_tokens` tokens of all sequences together; if not given, as many as fit in
    `config.kv_cache_memory_bytes`, by default `KV_CACHE_BYTES`, but no more than `max_num_seqs` sequences of the
    model's context length. A `draft_model`, a smaller decoder of the same vocabulary, gets a cache of its own of at
    most the same memory. With `ranks`, `model` is the first rank's part of a model, whose other ranks get caches for
    the same number of tokens; the draft model is not split. The dtype and device of a cache are those of its model's
    parameters; step sizes that the config leaves out are the defaults for the device. Raises `UnknownName` for an
    unknown cache family, and `InvalidValue` if the memory does not hold one token of each sequence, or as
    `require_batch_invariant` does.
    """
    config = config.with_defaults(next(model.parameters()).device.type)  # type: ignore[attr-defined]
    if config.batch_invariant:
        require_batch_invariant(model, config)
    store = _store(model, config, kv_cache_tokens, ranks)
    if draft_model is None:
        return Engine(model, store, tokenizer, config, prompt_lookup=_prompt_lookup(model, config, ranks))
    draft = DraftModel(draft_model, _store(draft_model, config, None), config.batch_sizes[1])
    return Engine(model, store, tokenizer, config, draft_model=draft)


def require_batch_invariant(model: LanguageModel, config: EngineConfig) -> None:
    """Let each part of a block be computed by itself, unless kernels of whole blocks give the same bits.

    Raises `InvalidValue` for what would change results: other devices and dtypes, lossy caches, several ranks, and
    weights in a form that is multiplied otherwise than in training.
    """
    dtype, device = _dtype_and_device(model)
    if device != "cpu" or dtype == "float64":
        raise InvalidValue.of(
            "batch_invariant", f"true for {dtype} on {device}", "false, or float32 or 16 bits on a CPU"
        )
    if config.tensor_parallel_size > 1:
        raise InvalidValue.of("tensor_parallel_size", config.tensor_parallel_size, "1 with batch_invariant")
    if installed().caches.get(config.kv_cache).loss:
        raise InvalidValue.of("kv_cache", config.kv_cache, "a cache that rounds nothing, with batch_invariant")
    modules = model.modules() if isinstance(model, Module) else ()
    forms = {str(form) for module in modules if (form := getattr(module, "form", None)) is not None}
    if not forms <= SUMMED_IN_ORDER:
        given = ", ".join(sorted(forms - SUMMED_IN_ORDER))
        raise InvalidValue.of("quantization", given, "none or float32 with batch_invariant")
    if hasattr(model, "take_apart"):
        model.take_apart(unless_composed=True)


def _prompt_lookup(model: LanguageModel, config: EngineConfig, ranks: Leader | None) -> PromptLookupProposer:
    """The proposer of draft tokens by prompt lookup.

    It is adaptive, and then also drafts for requests that set no number of draft tokens, if the config sets none either
    and drafts cannot change a bit of the results: for batch-invariant models on one rank with a lossless cache.
    """
    exact = installed().caches.get(config.kv_cache).loss == 0
    unasked = config.num_speculative_tokens is None and ranks is None and exact
    if unasked and isinstance(model, BatchInvariant) and model.batch_invariant:
        return AdaptivePromptLookup(model)
    return PromptLookupProposer()


def kv_cache_size(model: LanguageModel, family: CacheFamily, config: EngineConfig) -> StoreSize:
    """The largest cache within `config.kv_cache_memory_bytes`, or `KV_CACHE_BYTES`, by the family's own formula, but no
    larger than `max_num_seqs` sequences of the model's context length need.

    Raises `InvalidValue` if the memory does not hold a single token.
    """
    count, allowed = config.batch_sizes[0], config.kv_cache_memory_bytes or KV_CACHE_BYTES
    dtype, device = _dtype_and_device(model)
    specs = model.state_specs()
    # Every request may have an encoder input of the maximum length.
    longest = getattr(model, "max_encoder_len", 0)
    empty, full = (family.bytes(specs, tokens=0, source=source, dtype=dtype) for source in (0, longest))

    def sized(tokens: int) -> StoreSize:
        return StoreSize(tokens=tokens, requests=count, dtype=dtype, device=device)

    def memory(tokens: int) -> int:
        return family.room(specs, sized(tokens)) + count * (full - empty)

    tokens = bisect_right(range(1, count * model.max_seq_len + 1), allowed, key=memory)
    if tokens < 1:
        least = f"at least {memory(1)} bytes, for {count} sequences; a smaller max_num_seqs needs less"
        raise InvalidValue.of("kv_cache_memory_bytes", allowed, least)
    return sized(tokens)


def _store(model: LanguageModel, config: EngineConfig, tokens: int | None, ranks: Leader | None = None) -> StateStore:
    family = installed().caches.get(config.kv_cache)
    if tokens is None:
        size = kv_cache_size(model, family, config)
    else:
        dtype, device = _dtype_and_device(model)
        size = StoreSize(tokens=tokens, requests=config.batch_sizes[0], dtype=dtype, device=device)
    store = family.create(model.state_specs(), size)
    return store if ranks is None else ranks.open_store(family, size, store)


def _dtype_and_device(model: LanguageModel) -> tuple[str, str]:
    parameter = next(model.parameters())  # type: ignore[attr-defined]
    return str(parameter.dtype).removeprefix("torch."), str(parameter.device)
