"""The engine's rate with models that transformers builds, beside the same weights in attn's own layout.

Usage: python benchmarks/transformers_route.py [--rounds 5] [--json FILE] [llama qwen3 gpt_neox]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from attn_models.loading import LoadedModel, load_model
from engine_measures import drained, engine_of, submit

SIZES = {"vocab_size": 32000, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
MODELS = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=2048, num_key_value_heads=4),
    "qwen3": transformers.Qwen3Config(**SIZES, intermediate_size=2048, num_key_value_heads=4, head_dim=64),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=3072),
}
REQUESTS, PROMPT, NEW = 16, 64, 48


def by_route(folder: Path) -> LoadedModel:
    return load_model(folder, quantization="auto", model_impl="transformers")


def rate(loaded: LoadedModel) -> float:
    """New tokens a second of all requests, after their prompts."""
    engine: Any = engine_of(loaded, "paged", REQUESTS, REQUESTS * 256)
    draw = torch.Generator().manual_seed(0)
    for i in range(REQUESTS):
        submit(engine, str(i), torch.randint(5, 31000, (PROMPT,), generator=draw).tolist(), NEW)
    engine.step()
    start = time.perf_counter()
    return drained(engine) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder)
            native, route = load_model(folder, quantization="auto"), by_route(Path(folder))
            rates: list[tuple[float, float]] = [(rate(native), rate(route)) for _ in range(args.rounds + 1)][1:]
        ratios = sorted(theirs / ours for ours, theirs in rates)
        ours, theirs = (round(statistics.median(each)) for each in zip(*rates, strict=True))
        found[name] = {"native": ours, "route": theirs, "ratios": [round(each, 3) for each in ratios]}
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name}: native {ours}, route {theirs} tokens/s, ratio {ratio}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
