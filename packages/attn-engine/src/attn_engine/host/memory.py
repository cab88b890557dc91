"""Computes how much GPU memory the KV cache gets: what weights and a step leave of `gpu_memory_utilization`."""

from __future__ import annotations

from typing import Any

import torch
from attn_core.errors import InvalidValue, OutOfCapacity
from attn_core.graph_safety import state_reason
from attn_models.device import device_memory, in_words, require_memory
from attn_schema import EngineConfig

from attn_engine.out_of_memory import release_memory, within_memory

REMEDY = "use a narrower --dtype, a smaller model or a smaller --max-num-batched-tokens"


def with_kv_cache_memory(config: EngineConfig, model: Any, device: torch.device, *, drafts: bool) -> EngineConfig:
    """The config with the default step sizes for `device` filled in and, on a GPU, `kv_cache_memory_bytes`.

    If `kv_cache_memory_bytes` is not given, it is `gpu_memory_utilization` of the total memory, less all memory that is
    in use now (including the weights of `model`), less the memory of a step of `max_num_batched_tokens` tokens, which
    is run to measure it, and less that of the CUDA graphs of steps with prompts. With a draft model (`drafts`) it is
    half of that, as the draft model's cache may take as much.

    Raises `OutOfCapacity`, with the numbers, if nothing is left, or if the given memory is not free.
    """
    config, caches = config.with_defaults(device.type), 2 if drafts else 1
    memory = device_memory(device)
    if memory is None:
        return config
    if config.kv_cache_memory_bytes is not None:
        needed = caches * config.kv_cache_memory_bytes
        require_memory(device, needed, "the KV cache", "Its size is set by --kv-cache-memory-bytes.")
        return config
    step = step_bytes(model, config, device)
    step += int(step * recorded_share(model, config))
    free, total = memory
    share = config.gpu_memory_utilization
    left = int(total * share) - (total - free) - step
    if left <= 0:
        raise OutOfCapacity(
            f"no memory is left for the KV cache on {device}: gpu_memory_utilization {share:g} of {in_words(total)} is "
            f"{in_words(int(total * share))}, {in_words(total - free)} are in use, a step and its graphs "
            f"need {in_words(step)}; raise --gpu-memory-utilization or {REMEDY}",
            device=device,
            needed_bytes=total - free + step,
            free_bytes=free,
        )
    return config.replace(kv_cache_memory_bytes=max(1, left // caches))


def recorded_share(model: Any, config: EngineConfig) -> float:
    """The size of the largest recorded step with prompts, whose memory CUDA graphs keep, as a fraction of a step of
    `max_num_batched_tokens` tokens; 0 if such steps are not recorded, for example because of the model's states."""
    states = model.state_specs().items()
    if config.enforce_eager or any(state_reason(layer, specs, max_query_len=2) for layer, specs in states):
        return 0.0
    return min(1.0, config.max_cudagraph_capture_size / config.batch_sizes[1])


def explain_too_small(error: InvalidValue, config: EngineConfig, device: torch.device) -> OutOfCapacity | InvalidValue:
    """Reword the error of a cache that is too small for its model in terms of the option that determined its size."""
    if error.metadata.get("field") != "kv_cache_memory_bytes" or device.type == "cpu":
        return error
    return OutOfCapacity(
        f"{error.message}. gpu_memory_utilization {config.gpu_memory_utilization:g} leaves "
        f"{in_words(config.kv_cache_memory_bytes or 0)} for it on {device}; {REMEDY}",
        device=device,
    )


def step_bytes(model: Any, config: EngineConfig, device: torch.device) -> int:
    """The peak memory in bytes, beyond the weights, of a step of `max_num_batched_tokens` tokens of a model.

    0 on devices other than CUDA, which have no such statistics. Raises `OutOfCapacity` if the step does not fit.
    """
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before, (sequences, tokens) = torch.cuda.memory_allocated(device), config.batch_sizes

    def computed() -> None:
        _compute(model, tokens, sequences, device)
        torch.cuda.synchronize(device)

    within_memory(computed, device, f"a step of {tokens} tokens")
    peak = torch.cuda.max_memory_allocated(device) - before
    release_memory(device)
    return peak


@torch.inference_mode()
def _compute(model: Any, tokens: int, sequences: int, device: torch.device) -> None:
    """Run the model over this many tokens, with logits of one token per sequence if the model allows so few."""
    length = min(tokens, model.max_seq_len)
    rows = max(1, tokens // length)
    given = torch.zeros(rows, length, dtype=torch.int64, device=device)
    longest = getattr(model, "max_encoder_len", None)
    if longest is not None:
        model(given[:1], given.new_zeros(1, longest))
    elif hasattr(model, "hidden"):
        model.logits(model.hidden(given).flatten(0, 1)[:sequences])
    else:
        model(given)
