"""What does `batch_invariant` cost on a CPU? Steps of an engine and of training, with and without it.

    python benchmarks/batch_invariance_cpu.py

A decoder with random weights in the sizes of SmolLM2-135M, in float32. Both settings take turns step by step; times are
medians of the processor time of one thread in ms, `cost` the median of the ratios of neighbouring steps. `packed` is
whether weights are packed, as they are where a model is served; GRPO's own engine samples from those that it trains.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.quantize import quantize_model
from attn_schema.decoder import DecoderConfig
from attn_train.precision import forward_precision
from checkpoint_stops import KINDS, SIZES
from report import write_report

VOCABULARY = 49152
CASES = ((1, 32, True), (8, 32, True), (1, 512, True), (8, 512, True), (8, 32, False))
"""Requests at once, tokens of their prompts, and whether weights are packed."""
TRAINED = 128
"""Tokens of a training step."""


def decoder(*, packed: bool) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=VOCABULARY, max_seq_len=2048, positions="rotary", norm="rms", **SIZES, **KINDS)
    model = Decoder(config).eval()
    if packed:
        quantize_model(model, "float32")
    return model


def compared(
    step: Callable[[bool], object], rounds: int, prepare: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The times of a step without and with the option, each `prepare`d by its number; the first round is left out."""
    found = []
    for number in range(rounds + 1):
        if prepare is not None:
            prepare(number)
        times = []
        for invariant in (False, True):
            start = time.process_time()
            step(invariant)
            times.append(1e3 * (time.process_time() - start))
        found.append(times)
    ordinary, own = (round(statistics.median(times), 1) for times in zip(*found[1:], strict=True))
    cost = statistics.median(own / ordinary for ordinary, own in found[1:])
    return {"ordinary": ordinary, "batch_invariant": own, "cost": round(cost, 3)}


def sampled(requests: int, prompt: int, rounds: int, *, packed: bool) -> Iterator[dict[str, Any]]:
    """The cost of new prompts, all in one step, and of decode steps after the last of them."""
    config = EngineConfig(max_num_seqs=requests, max_num_batched_tokens=requests * prompt, num_speculative_tokens=0)
    engines = [
        build_engine(
            decoder(packed=packed), config=config.replace(batch_invariant=on), kv_cache_tokens=requests * (prompt + 256)
        )
        for on in (False, True)
    ]
    task = SamplingParams(max_new_tokens=rounds + 4, ignore_eos=True, temperature=1.0, top_logprobs=0)

    def submit(round_: int) -> None:
        for engine in engines:
            for number in range(requests):
                engine.cancel(f"{round_ - 1}-{number}")
                factor = 13 * (number + 1) + 101 * round_
                ids = tuple((7 + factor * place) % VOCABULARY for place in range(prompt))
                engine.submit(Request(id=f"{round_}-{number}", token_ids=ids, params=task))

    def step(invariant: bool) -> None:  # noqa: FBT001 -- see `compared`
        engines[invariant].step()

    case = {"requests": requests, "prompt": prompt, "packed": packed}
    yield case | {"step": "prompts"} | compared(step, 5, submit)
    yield case | {"step": "decode"} | compared(step, rounds)


def trained(tokens: int, rounds: int) -> dict[str, Any]:
    """The cost of a forward and a backward pass."""
    model = decoder(packed=False).train()
    ids = torch.randint(VOCABULARY, (1, tokens + 1))

    def step(invariant: bool) -> None:  # noqa: FBT001 -- see `compared`
        with forward_precision("float32", ids.device, batch_invariant=invariant):
            loss = model.training_loss(ids[:, :-1], ids[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    return {"tokens": tokens, "step": "training"} | compared(step, rounds)


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    for requests, prompt, packed in CASES:
        yield from sampled(requests, prompt, rounds, packed=packed)
    yield trained(TRAINED, 7)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rounds", type=int, default=30, help="decode steps of each setting")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    args = p.parse_args()
    torch.set_num_threads(1)
    write_report("batch-invariance-cpu", {"question": "What does batch_invariant cost?"}, rows(args.rounds), args.out)


if __name__ == "__main__":
    main()
