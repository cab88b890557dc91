"""What KV-cache policies cost, and how much of what is asked they still recall.

    python benchmarks/kv_policies.py

One attention layer whose weights are set so that full attention recalls every value: a token holds a key and a value,
random unit vectors; queries and keys read the first, values the second. Of 64 pairs among 192 fillers, 16 are asked at
the end. "asked before": each has been asked once between the pairs and the end, so that a policy can have seen what is
needed; "first asked": none has. Bytes are those of the state after all tokens, in bf16; products are those of one step.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from attn_core import Step, configure, installed, state_bytes
from torch import Tensor

SIZE, PAIRS, FILLERS, ASKED, SHARP = 32, 64, 192, 16, 40.0
WHOLE = PAIRS + FILLERS + ASKED
"""The tokens up to the end of what is asked first: with such an interval SnapKV chooses there, as in its paper."""
KEPT = (144, 72, 36)
"""The budgets: a half, a quarter and an eighth of all tokens."""


def policies(rows: int) -> list[tuple[str, dict[str, Any]]]:
    """Each policy by name, with the options that keep about `rows` rows, or read as many."""
    half = rows // 2
    return [
        ("attention_sinks", {"sinks": 4, "window": rows - 4}),
        ("h2o", {"heavy": half, "recent": half}),
        ("tova", {"budget": rows}),
        ("snapkv", {"budget": half, "interval": half, "window": ASKED, "pool": 1}),
        ("snapkv", {"budget": rows, "interval": WHOLE, "window": ASKED, "pool": 1}),
        ("snapkv", {"budget": rows, "interval": WHOLE, "window": ASKED, "pool": 5}),
        ("quest", {"block": 8, "top": rows // 8}),
    ]


def sequence(seed: int, *, before: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [token, 2 * SIZE], the values of all pairs [pair, SIZE], and the pairs that the last tokens ask for."""
    drawn = torch.Generator().manual_seed(seed)

    def units(count: int) -> Tensor:
        return torch.nn.functional.normalize(torch.randn(count, SIZE, generator=drawn), dim=-1)

    keys, values = units(PAIRS), units(PAIRS)
    tokens = torch.cat([torch.cat([keys, values], 1), torch.cat([units(FILLERS), units(FILLERS)], 1)])
    tokens = tokens[torch.randperm(len(tokens), generator=drawn)]
    asked = torch.randperm(PAIRS, generator=drawn)[:ASKED]
    question = torch.cat([keys[asked], torch.zeros(ASKED, SIZE)], 1)
    return torch.cat([tokens, *([question] if before else []), question]), values, asked


def layer(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The layer of a policy with the weights described above, and its config."""
    config = configure(installed().mechanisms.get(name), hidden_size=2 * SIZE, num_heads=1, options=options)
    built = installed().mechanisms.get(name).build(config).eval()
    key = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1)
    first = torch.cat([key, torch.zeros_like(key)])
    second = torch.cat([torch.cat([torch.zeros(SIZE, SIZE), torch.eye(SIZE)], 1), torch.zeros_like(key)])
    with torch.no_grad():
        for part, weight in (
            ("query", SHARP * first),
            ("key", first),
            ("value", second),
            ("output", torch.eye(2 * SIZE)),
        ):
            getattr(built, part).weight.copy_(weight)
    return built, config


@torch.no_grad()
def recalled(name: str, options: dict[str, Any], *, before: bool, sequences: int) -> float:
    """The share of the asked values that are nearest to the output."""
    built, _ = layer(name, options)
    right = 0
    for seed in range(sequences):
        tokens, values, asked = sequence(seed, before=before)
        found = built(tokens[None])[0, -ASKED:, :SIZE] @ values.T
        right += int((found.argmax(-1) == asked).sum())
    return right / (ASKED * sequences)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=8)
    sequences = parser.parse_args().sequences
    print("| policy | options | first asked | asked before | bytes | products of a step |")
    print("|---|---|---|---|---|---|")
    rows: list[tuple[str, dict[str, Any]]] = [("gqa", {})] + [each for kept in KEPT for each in policies(kept)]
    tokens = PAIRS + FILLERS + 2 * ASKED
    for name, options in rows:
        mechanism = installed().mechanisms.get(name)
        _, config = layer(name, options)
        size = state_bytes(mechanism.state(config), tokens=tokens, dtype="bfloat16")
        cost = mechanism.cost(config, Step(batch=1, new=1, remembered=tokens - 1))
        shares = [recalled(name, options, before=before, sequences=sequences) for before in (False, True)]
        words = ", ".join(f"{key} {value}" for key, value in options.items())
        print(
            f"| {name} | {words} | {shares[0]:.0%} | {shares[1]:.0%} | {size:,} | {cost.allowed_flops:,} |", flush=True
        )


if __name__ == "__main__":
    main()
