"""Whether recorded steps are right: prompts of many chunks, after all caches were emptied and their memory overwritten.

The tokens and log probabilities of an engine whose steps are recorded are compared with those of an eager one. Where
rounding makes them choose different tokens, both must be nearly as likely.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from engine_gpu import TINY, random_model
from prompt_steps import recording

from attn_engine import Engine, Request  # isort: skip -- engine_gpu has made known what these find
from attn_models.decoder.decoder import Decoder  # isort: skip
from attn_schema import EngineConfig, SamplingParams  # isort: skip

SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 1024, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2,
    "intermediate_size": 2048, "tie_word_embeddings": False, "max_seq_len": 1 << 16,
}  # fmt: skip
PROMPTS, CHUNK, NEW = (300, 3000, 9000, 33_000), 2048, 8
ALLOWED = 0.1
"""The largest difference of log probabilities: those of wrong tokens differ by several units."""
SHARP = 30.0
"""The factor of the output weights, so that some tokens are much more likely than others."""


class Way(NamedTuple):
    """How tokens are chosen, and whether the next step is launched before they are known."""

    name: str
    params: dict[str, Any]
    asynchronous: bool = False


WAYS = (
    Way("greedy", {"temperature": 0}),
    Way("greedy, asynchronous", {"temperature": 0}, asynchronous=True),
    Way("top-p", {"temperature": 1.0, "top_p": 0.8, "seed": 1}),
)


def verdicts(device: str, *, small: bool) -> Iterator[dict[str, Any]]:
    """For each way and prompt, the largest difference of log probabilities, and whether the tokens are right."""
    shape = TINY | {"max_seq_len": 256, "tie_word_embeddings": False} if small else SHAPE
    prompts, chunk = ((9, 40), 16) if small else (PROMPTS, CHUNK)
    model = random_model(shape, device)
    with torch.no_grad():
        model.unembedding.weight.mul_(SHARP)
    for way in WAYS[:1] if small else WAYS:
        eager, recorded = (engine_of(model, way, max(prompts), chunk, eager=eager) for eager in (True, False))
        recorded.warm_up()
        forget(device)
        for length in prompts:
            usual, found = (answer(engine, length, way) for engine in (eager, recorded))
            error = apart(usual, found)
            right = error < ALLOWED and not recorded.eager_reasons
            row = {"case": f"{way.name}, {length} tokens", "what": "tokens", "error": error, "right": right}
            yield row | {"eager": recorded.eager_reasons}


def engine_of(model: Decoder, way: Way, longest: int, chunk: int, *, eager: bool) -> Engine:
    """An engine that reads prompts in chunks, recorded unless `eager`."""
    config = EngineConfig(
        max_num_seqs=4, max_num_batched_tokens=chunk, max_cudagraph_capture_size=chunk, enforce_eager=eager,
        async_scheduling=way.asynchronous and not eager,
    )  # fmt: skip
    return recording(model, config, kv_cache_tokens=longest + 256)


def forget(device: str) -> None:
    """Empty all caches of attn's functions, and overwrite the memory that they held."""
    gc.collect()
    for one in gc.get_objects():
        if type(one) is functools._lru_cache_wrapper and (one.__module__ or "").startswith("attn_"):  # noqa: SLF001
            one.cache_clear()
    gc.collect()
    for size in (8, 16, 20):
        held = [torch.full((1 << size,), float("nan"), device=device) for _ in range(32)]
        del held


def answer(engine: Engine, length: int, way: Way) -> list[tuple[int, float]]:
    """The new tokens of a prompt with their log probabilities."""
    size = engine._runner.model.vocab_size - 2  # noqa: SLF001 -- tokens must be among the model's
    ids = tuple(1 + (31 * length + 13 * place) % size for place in range(length))
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, top_logprobs=0, **way.params)
    engine.submit(Request(id="prompt", token_ids=ids, params=params))
    found = []
    while not engine.idle:
        found += [(token.id, token.logprob) for output in engine.step() for token in output.delta.tokens]
    return found


def apart(usual: list[tuple[int, float]], found: list[tuple[int, float]]) -> float:
    """The largest difference of log probabilities until the tokens differ."""
    largest = 0.0 if len(usual) == len(found) else float("inf")
    for one, other in zip(usual, found, strict=False):
        difference = abs(one[1] - other[1])
        largest = max(largest, difference) if difference == difference else float("inf")
        if one[0] != other[0]:
            break
    return largest
