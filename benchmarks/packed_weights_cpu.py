"""What do packed weights cost in quality, and save in memory and loading time?

Perplexity on real text, the same windows for every format:

    python benchmarks/packed_weights_cpu.py MODEL_FOLDER TEXT_FILE

The text may come from `attn pull shakespeare`. The result is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import write_report


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder")
    p.add_argument("text", type=Path, help="a text, UTF-8")
    p.add_argument("--tokens", type=int, default=4096, help="how many tokens of the middle of the text")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path)
    return p.parse_args()


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch
    from attn_core.kernels.linear import WEIGHT_FORMATS
    from attn_models.evaluation import MAX_WINDOW, text_loss
    from attn_models.loading import load_model

    torch.set_num_threads(args.threads)
    text = args.text.read_text(encoding="utf-8")
    middle = len(text) // 2
    for weights in (None, *(name for name in WEIGHT_FORMATS if name != "fp8")):  # fp8 is only for GPUs
        load_model(
            args.model, quantization=weights, verify="sizes"
        )  # warm-up: compiles kernels and reads the files into the page cache
        start = time.perf_counter()
        loaded = load_model(args.model, quantization=weights, verify="sizes")
        seconds = time.perf_counter() - start
        ids = loaded.tokenizer.encode(text[middle : middle + 8 * args.tokens])[: args.tokens]
        loss = text_loss(loaded.model, ids, min(loaded.model.max_seq_len, MAX_WINDOW))
        held = sum(tensor.nbytes for tensor in (*loaded.model.parameters(), *loaded.model.buffers()))
        yield {
            "weights": weights or "as loaded, float32",
            "perplexity": round(math.exp(loss), 3),
            "loss": round(loss, 5),
            "tokens": len(ids),
            "megabytes": round(held / 1e6, 1),
            "seconds_to_load": round(seconds, 2),
        }


def main() -> None:
    args = arguments()
    facts = {"question": "perplexity on real text, bytes and seconds to load by format of weights"}
    write_report("packed_weights_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
