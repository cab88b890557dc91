"""Which shares of what this chip's memory and units can do does a whole model reach, at batch 1 and in a long prompt?

    python benchmarks/hardware_shares_cpu.py MODEL_FOLDER --threads 2     # and results/hardware-shares-cpu.json

In the same run and with the same threads: the bandwidth of reading (a sum over 512 MiB) and of copying (bytes read and
bytes written), and the most FLOP/s of a product of square matrices of 2048, torch's and ours, in float32 and in
bfloat16. A decode step at batch 1 reads every weight once; its share is those bytes, as the form holds them, a second,
of the bandwidth; keys and values are few here and are not counted. A prompt's share is the FLOPs of its products a
second, two for each weight and token and four for each width, query and allowed key, of the peak of the element type
in which the form multiplies; forms with whole-number inputs have no such peak and stand beside float32's. Everything
takes turns; figures are medians of rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attn_kernels_cpu.chip import statement
from attn_kernels_cpu.products import product, rounded_product
from attn_models.loading import LoadedModel
from engine_measures import LONG_PROMPT, load_form, new_tokens, prefill
from report import RESULTS, write_report

READ_BYTES = 512 * 2**20
SIDE = 2048
NEW_TOKENS = 48
PROMPT = "The history of the city begins with number one, and the first thing that"
FORMS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "weights=auto": "float32",
    "weights=int8": "",
    "weights=int4": "",
}
"""Forms of the weights, and the element type in which each multiplies long prompts, if it is one of floats."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="folder of a model")
    p.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, default=RESULTS / "hardware-shares-cpu.json")
    return p.parse_args()


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """Of the fastest of so many calls."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def hardware() -> dict[str, float]:
    """Gigabytes a second of memory, and GFLOP/s of products, by element type the best of torch's and ours."""
    data = torch.ones(READ_BYTES // 4)
    place = torch.empty_like(data)
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    low, lower = left.bfloat16(), right.bfloat16()
    flops = 2 * SIDE**3 / 1e9
    return {
        "read": READ_BYTES / 1e9 / seconds(data.sum, 4),
        "copy": 2 * READ_BYTES / 1e9 / seconds(lambda: place.copy_(data), 4),
        "float32": flops / min(seconds(lambda: left @ right, 3), seconds(lambda: product(left, right), 3)),
        "bfloat16": flops / min(seconds(lambda: low @ lower, 3), seconds(lambda: rounded_product(left, right), 3)),
    }


def weight_bytes(loaded: LoadedModel) -> int:
    """Weights that a step reads, as they are held; the table of embeddings only where it is the unembedding, too."""
    held = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    packed = any(name.startswith("head.") for name, _ in held)
    return sum(t.numel() * t.element_size() for name, t in held if not (packed and name.startswith("embedding.")))


def prompt_flops(loaded: LoadedModel) -> float:
    """Of the products for a long prompt, of which only the last row has logits."""
    config = loaded.model.config
    blocks = sum(p.numel() for p in loaded.model.blocks.parameters())
    pairs = LONG_PROMPT * (LONG_PROMPT + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2.0 * blocks * LONG_PROMPT + attention + 2.0 * config.hidden_size * config.vocab_size


def rates(loaded: LoadedModel) -> dict[str, float]:
    """Decode steps and prompts a second. A step's rate is that of many less that of few, so that no prompt is in it."""
    many = seconds(lambda: new_tokens(loaded, "shared", [PROMPT], NEW_TOKENS + 1))
    one = seconds(lambda: new_tokens(loaded, "shared", [PROMPT], 1))
    return {"steps": NEW_TOKENS / (many - one), "prompts": 1 / seconds(lambda: prefill(loaded, "shared"))}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each form the shares of rounds."""
    float32, _ = load_form(args, "float32")
    flops = prompt_flops(float32)
    del float32
    for form in args.forms:
        loaded, _ = load_form(args, form)
        read = weight_bytes(loaded)
        rates(loaded)
        found = [(hardware(), rates(loaded)) for _ in range(args.rounds)]
        peak = FORMS[form] or "float32"
        yield {
            "form": form,
            "weight_megabytes": round(read / 1e6, 1),
            "steps_per_second": round(statistics.median(rate["steps"] for _, rate in found), 1),
            "prompt_tokens_per_second": round(statistics.median(rate["prompts"] for _, rate in found) * LONG_PROMPT),
            "prompt_gflops": round(statistics.median(rate["prompts"] for _, rate in found) * flops / 1e9, 1),
            "share_of_read": [round(read / 1e9 * rate["steps"] / chip["read"], 3) for chip, rate in found],
            "share_of_copy": [round(read / 1e9 * rate["steps"] / chip["copy"], 3) for chip, rate in found],
            "peak_of": peak,
            "share_of_peak": [round(rate["prompts"] * flops / 1e9 / chip[peak], 3) for chip, rate in found],
            "hardware": {name: round(statistics.median(chip[name] for chip, _ in found), 1) for name in found[0][0]},
        }


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    facts = {"question": (__doc__ or "").splitlines()[0], "threads": args.threads, "chip": statement()}
    write_report("hardware-shares-cpu", facts, rows(args), args.out)


if __name__ == "__main__":
    main()
