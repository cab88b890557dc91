"""How many steps does speculative decoding save? Chains and trees, by prompt lookup and draft models, on a real model.

    python benchmarks/speculation_cpu.py MODEL_FOLDER
    python benchmarks/speculation_cpu.py MODEL_FOLDER --ways none unasked --weights int8 --temperatures 0 1 --threads 1

Questions, requests to repeat, edit or quote a given text or code, and texts to continue (--text FILE) are answered one
at a time. A row reports the engine's steps for the number of tokens, the fraction of draft tokens that were accepted,
and the tokens per second of processor time, which depends little on other load; answers alternate with and without
speculation, and must have the same tokens. "unasked" is the engine's default. Draft models are the model itself with
4-bit weights, and its first layers alone, without further training. The result, with the machine and its load before
and after, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attn_core.models import LanguageModel
from attn_engine import EngineConfig, Request, SamplingParams, build_engine
from attn_models.loading import LoadedModel, load_model
from report import write_report
from safetensors.torch import load_file, save_file

QUESTIONS = ("What is the capital of France?", "Why is the sky blue?", "List three fruits.", "What does a compiler do?")
TEXT = (
    "The committee met on Tuesday in the town hall. The committee agreed that the bridge over the river must be mended "
    "before winter, and that the road to the bridge must be closed while the bridge is mended."
)
CODE = """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def spread(values):
    middle = mean(values)
    total = 0.0
    for value in values:
        total += (value - middle) ** 2
    return total / len(values)
"""
EDIT = tuple(
    f"Rename {old} to {new} in this code and write all of it again:\n{CODE}"
    for old, new in (("mean", "average"), ("values", "numbers"))
)
QUOTE = (f"Quote the most important sentence of this text word for word, then say why: {TEXT}",)
AGAIN = (f"Repeat this text word for word: {TEXT}", f"Write this text twice: {TEXT}")
WAYS = (
    ("none", 0, 1),
    ("unasked", None, 1),
    ("lookup", 4, 1),
    ("lookup", 4, 3),
    ("int4", 4, 1),
    ("int4", 4, 3),
    ("shallow", 4, 1),
    ("shallow", 4, 3),
)
"""The compared ways of speculation: the source of draft tokens, their number per step, and the tree width."""


def shallow(folder: Path, layers: int, into: Path) -> LanguageModel:
    """The model with only its first `layers` layers, and its final norm and unembedding."""
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    kept = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        if found is None or int(found[1]) < layers:
            kept[name] = tensor
    save_file(kept, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (into / name).write_bytes((folder / name).read_bytes())
    return load_model(into).model


Way = tuple[str, int | None, int]


def answer(loaded: LoadedModel, ids: tuple[int, ...], params: SamplingParams, way: Way, draft: Any) -> dict[str, Any]:
    """The tokens of one answer, and the steps, draft tokens and time that they took after the first."""
    _, guesses, branches = way
    limits = EngineConfig(num_speculative_tokens=guesses, speculative_tree_width=branches)
    engine = build_engine(
        loaded.model, loaded.tokenizer, limits.replace(max_num_seqs=2), kv_cache_tokens=2048, draft_model=draft
    )
    engine.submit(Request(id="r", token_ids=ids, params=params))
    made = [token.id for event in engine.step() for token in event.delta.tokens]
    steps, begun = 1, time.process_time()
    while not engine.idle:
        steps += 1
        made += [token.id for event in engine.step() for token in event.delta.tokens]
    load = engine.stats()
    took = time.process_time() - begun
    return {"made": made, "steps": steps, "guessed": load.draft_tokens, "right": load.accepted_tokens, "took": took}


def texts(args: argparse.Namespace, tokenizer: Any) -> dict[str, list[tuple[int, ...]]]:
    """The prompts, as token ids, by kind of text."""
    asked = {"questions": QUESTIONS, "write again": AGAIN, "edit code": EDIT, "quote": QUOTE}
    found = {
        kind: [tuple(tokenizer.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts]
        for kind, prompts in asked.items()
    }
    if args.text is not None:
        text = args.text.read_text()
        starts = range(0, len(text) - 600, max(1, len(text) // 6))
        found["continue a text"] = [tuple(tokenizer.encode(text[start : start + 600])) for start in starts]
    return {kind: prompts for kind, prompts in found.items() if args.kinds is None or kind in args.kinds}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, quantization=args.weights)
    ways = [way for way in WAYS if way[0] in args.ways]
    known: dict[str, LanguageModel | None] = dict.fromkeys(args.ways)
    if "int4" in args.ways:
        known["int4"] = load_model(args.model, quantization="int4").model
    if "shallow" in args.ways:
        with tempfile.TemporaryDirectory() as into:
            known["shallow"] = shallow(args.model, args.layers, Path(into))
    for temperature in args.temperatures:
        params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=3)
        for kind, prompts in texts(args, loaded.tokenizer).items():
            found: dict[Way, list[dict[str, Any]]] = {way: [] for way in ways}
            for ids in prompts * args.repeats:
                for way in ways:
                    found[way].append(answer(loaded, ids, params, way, known[way[0]]))
            plain = found[ways[0]]
            for way, answers in found.items():
                yield {"texts": kind, "temperature": temperature} | summary(way, answers, plain)


def summary(way: Way, answers: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of one way of speculation on some prompts, compared with that of the first way."""
    tokens, steps = sum(len(one["made"]) for one in answers), sum(one["steps"] for one in answers)
    guessed, right = (sum(one[key] for one in answers) for key in ("guessed", "right"))
    faster = [first["took"] / one["took"] for one, first in zip(answers, plain, strict=True)]
    return {
        "guesses from": way[0],
        "ahead": way[1],
        "branches": way[2],
        "same tokens": [one["made"] for one in answers] == [one["made"] for one in plain],
        "tokens": tokens,
        "steps": steps,
        "tokens a step": round(tokens / steps, 2),
        "guessed": guessed,
        "right of guessed": round(right / guessed, 3) if guessed else None,
        "tokens a second of CPU": round(tokens / sum(one["took"] for one in answers), 1),
        "times as fast": round(statistics.median(faster), 2),
        "least and most": [round(min(faster), 2), round(max(faster), 2)],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--tokens", type=int, default=96, help="new tokens of an answer, at most")
    p.add_argument("--layers", type=int, default=20, help="layers of the shallow draft")
    p.add_argument("--weights", default="auto")
    p.add_argument("--ways", nargs="+", default=list(dict.fromkeys(way[0] for way in WAYS)), help="none comes first")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    p.add_argument("--repeats", type=int, default=1)
    p.add_argument("--kinds", nargs="+", help="the kinds of texts; all if not given")
    p.add_argument("--text", type=Path, help="a text file of which some places are continued")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    facts = {"question": "steps and tokens a second with guesses, chains and trees", "layers of shallow": args.layers}
    write_report("speculation_cpu", facts, rows(args), args.out)


if __name__ == "__main__":
    main()
