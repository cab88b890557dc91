"""What fraction of the CPU's memory bandwidth and peak FLOP/s does a model reach, at batch 1 and in a long prompt?

    python benchmarks/hardware_shares_cpu.py MODEL_FOLDER --threads 2     # and results/hardware-shares-cpu.json

Measured in the same run with the same threads: the bandwidth of reading (a sum over 512 MiB) and of copying (bytes read
plus bytes written), and the peak FLOP/s of the product of square matrices of size 2048, the best of torch's and attn's,
in float32 and bfloat16. A decode step at batch 1 reads every weight once; its fraction is the bytes of the weights as
stored, per second, divided by the bandwidth; keys and values are negligible here. A prompt's fraction is the FLOPs of
its matrix products per second (two for each weight and token, four for each channel, query and allowed key), divided by
the peak of the element type in which the form multiplies; forms with integer inputs are compared with float32's peak.
All measurements take turns; figures are medians of rounds.
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
"""The weight formats, and the floating-point type in which each multiplies long prompts; none for integer inputs."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="folder of a model")
    p.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, default=RESULTS / "hardware-shares-cpu.json")
    return p.parse_args()


def seconds(run: Callable[[], object], times: int = 1) -> float:
    """The seconds of the fastest of `times` calls."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def hardware() -> dict[str, float]:
    """The memory bandwidth in GB/s, and the GFLOP/s of matrix products by element type, best of torch's and attn's."""
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
    """The bytes of the weights that a step reads, as stored; the embedding table counts only if used as unembedding."""
    held = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    packed = any(name.startswith("head.") for name, _ in held)
    return sum(t.numel() * t.element_size() for name, t in held if not (packed and name.startswith("embedding.")))


def prompt_flops(loaded: LoadedModel) -> float:
    """The FLOPs of the matrix products for a long prompt; logits are computed only for its last token."""
    config = loaded.model.config
    blocks = sum(p.numel() for p in loaded.model.blocks.parameters())
    pairs = LONG_PROMPT * (LONG_PROMPT + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 2.0 * blocks * LONG_PROMPT + attention + 2.0 * config.hidden_size * config.vocab_size


def rates(loaded: LoadedModel) -> dict[str, float]:
    """The decode steps and prompts per second. The time of steps is a difference of two runs, without the prompt."""
    many = seconds(lambda: new_tokens(loaded, "shared", [PROMPT], NEW_TOKENS + 1))
    one = seconds(lambda: new_tokens(loaded, "shared", [PROMPT], 1))
    return {"steps": NEW_TOKENS / (many - one), "prompts": 1 / seconds(lambda: prefill(loaded, "shared"))}


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each weight format, with the fractions reached in each round."""
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
