"""How many steps do guesses save? Chains and trees, from the text itself and from drafts, on a real model.

    python benchmarks/speculation_cpu.py MODEL_FOLDER

Questions, and requests to write a given text again, are answered greedily one at a time. A row says how many steps the
engine took for how many tokens, what share of the guessed tokens was right, and the tokens a second; tokens must be
those without a guess. Drafts are the model itself with weights in four bits, and its first layers alone, untrained as
such. The result, with the machine and its load before and after, goes to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
AGAIN = (f"Repeat this text word for word: {TEXT}", f"Write this text twice: {TEXT}")
WAYS = (
    ("none", 0, 1),
    ("lookup", 4, 1),
    ("lookup", 4, 3),
    ("int4", 4, 1),
    ("int4", 4, 3),
    ("shallow", 4, 1),
    ("shallow", 4, 3),
)
"""Who guesses, how many tokens ahead, and in how many ways."""


def shallow(folder: Path, layers: int, into: Path) -> LanguageModel:
    """The first layers of a model, and what it makes of the rows behind its last one."""
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


def answer(loaded: LoadedModel, prompt: str, tokens: int, way: tuple[str, int, int], draft: Any) -> dict[str, Any]:
    """The tokens of one answer, and what they took."""
    _, guesses, branches = way
    limits = EngineConfig(num_speculative_tokens=guesses, speculative_tree_width=branches)
    engine = build_engine(
        loaded.model, loaded.tokenizer, limits.replace(max_num_seqs=2), kv_cache_tokens=2048, draft_model=draft
    )
    ids = tuple(loaded.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
    engine.submit(Request(id="r", token_ids=ids, params=SamplingParams(max_new_tokens=tokens)))
    steps, made, begun = 0, list[int](), time.perf_counter()
    while not engine.idle:
        steps += 1
        made += [token.id for event in engine.step() for token in event.delta.tokens]
    load = engine.stats()
    took = time.perf_counter() - begun
    return {"made": made, "steps": steps, "guessed": load.draft_tokens, "right": load.accepted_tokens, "took": took}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(args.threads)
    loaded = load_model(args.model, quantization=args.weights)
    known: dict[str, LanguageModel | None] = {"none": None, "lookup": None}
    known["int4"] = load_model(args.model, quantization="int4").model
    with tempfile.TemporaryDirectory() as into:
        known["shallow"] = shallow(args.model, args.layers, Path(into))
    for kind, prompts in (("questions", QUESTIONS), ("write again", AGAIN)):
        plain: list[list[int]] = []
        for way in WAYS:
            found = [answer(loaded, prompt, args.tokens, way, known[way[0]]) for prompt in prompts]
            plain = plain or [one["made"] for one in found]
            tokens = sum(len(one["made"]) for one in found)
            guessed = sum(one["guessed"] for one in found)
            steps = sum(one["steps"] for one in found)
            yield {
                "texts": kind,
                "guesses from": way[0],
                "ahead": way[1],
                "branches": way[2],
                "same tokens": [one["made"] for one in found] == plain,
                "tokens": tokens,
                "steps": steps,
                "tokens a step": round(tokens / steps, 2),
                "right of guessed": round(sum(one["right"] for one in found) / guessed, 3) if guessed else None,
                "tokens a second": round(tokens / sum(one["took"] for one in found), 1),
            }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path)
    p.add_argument("--tokens", type=int, default=96, help="new tokens of an answer, at most")
    p.add_argument("--layers", type=int, default=20, help="layers of the shallow draft")
    p.add_argument("--weights", default="auto")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path)
    args = p.parse_args()
    facts = {"question": "steps and tokens a second with guesses, chains and trees", "layers of shallow": args.layers}
    write_report("speculation_cpu", facts, rows(args), args.out)


if __name__ == "__main__":
    main()
