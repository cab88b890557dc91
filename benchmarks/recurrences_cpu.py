"""How fast are chunkwise linear recurrences on a CPU, compared with dense causal attention and fla-core's torch code?

    python benchmarks/recurrences_cpu.py --lengths 1024 4096

For every kind of recurrence and length: the milliseconds of the forward pass, and of forward and backward together, in
float32, as medians of the repeats, all interleaved in one process. `dense` is torch's fused attention, which computes
all pairs; `fla` is the chunkwise form of fla-core 0.6.0, or the token-by-token form if it has no other for a CPU. Only
ratios within one run should be compared. The result, with the machine and its load before and after, is written to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from attn_core.kernels.recurrence import Steps
from attn_variants.mechanisms.recurrence_scan import chunked
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
Run = Callable[[], Tensor]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--size", type=int, default=64, help="of keys and values of a head")
    p.add_argument("--chunk", type=int, default=64)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def naive(operation: str) -> Any:
    """The module with the plain torch code of an fla-core operation, loaded from its file, as fla imports triton."""
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{operation}", Path(str(path)))
    if spec is None or spec.loader is None:
        raise SystemExit(f"fla-core has no {operation}: pip install --no-deps fla-core==0.6.0 einops")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn(args: argparse.Namespace, length: int) -> dict[str, Tensor]:
    """Random inputs [1, tokens, heads, size] of all kinds, with keys of norm 1; all require gradients."""
    torch.manual_seed(0)
    shape = 1, length, args.heads, args.size
    parts = {
        "query": torch.randn(shape),
        "key": torch.nn.functional.normalize(torch.randn(shape), dim=-1),
        "value": torch.randn(shape),
        "channel": -torch.rand(shape) / 16,
        "head": -torch.rand(*shape[:3], 1) / 16,
        "strength": torch.rand(*shape[:3]),
    }
    return {name: part.requires_grad_() for name, part in parts.items()}


def contenders(parts: dict[str, Tensor], chunk: int) -> dict[str, dict[str, Run]]:
    """The functions to compare for each kind of recurrence, attn's and fla's; `softmax` is dense attention."""
    q, k, v, channel, head, strength = parts.values()

    def ours(decay: Tensor | None, beta: Tensor | None) -> Run:
        return lambda: chunked(Steps(q, k, v, decay, beta), None, chunk)[0]

    def heads_first(function: Any) -> Run:
        return lambda: function(*(part.transpose(1, 2) for part in (q, k, v, strength)), chunk_size=chunk)[0]

    one = head[..., 0]
    return {
        "softmax": {"dense": lambda: dense(q, k, v)},
        "none": {"ours": ours(None, None), "fla": lambda: naive("linear_attn").naive_chunk_linear_attn(q, k, v)},
        "head": {
            "ours": ours(head, None),
            "fla": lambda: naive("simple_gla").naive_chunk_simple_gla(q, k, v, one, chunk_size=chunk)[0],
        },
        "channel": {"ours": ours(channel, None), "fla": lambda: naive("gla").naive_recurrent_gla(q, k, v, channel)[0]},
        "delta": {"ours": ours(None, strength), "fla": heads_first(naive("delta_rule").delta_rule_chunkwise)},
        "delta+head": {
            "ours": ours(head, strength),
            "fla": lambda: naive("gated_delta_rule").naive_chunk_gated_delta_rule(
                q, k, v, one, strength, chunk_size=chunk
            )[0],
        },
        "delta+channel": {
            "ours": ours(channel, strength),
            "fla": lambda: naive("kda").naive_chunk_kda(q, k, v, channel, strength, chunk_size=chunk)[0],
        },
    }


def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal softmax attention over all pairs."""
    parts = (part.transpose(1, 2) for part in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)


def milliseconds(run: Run, *, backward: bool) -> float:
    """The milliseconds of one run."""
    start = time.perf_counter()
    if backward:
        run().sum().backward()
    else:
        with torch.no_grad():
            run()
    return 1000 * (time.perf_counter() - start)


def measure(args: argparse.Namespace, length: int) -> list[dict[str, Any]]:
    """The rows of one length; the functions take turns, so that other load affects all equally."""
    named = [
        (kind, system, run)
        for kind, systems in contenders(drawn(args, length), args.chunk).items()
        for system, run in systems.items()
    ]
    rows = []
    for backward in (False, True):
        times: dict[tuple[str, str], list[float]] = {}
        for turn in range(args.repeats + 1):
            for kind, system, run in named:
                took = milliseconds(run, backward=backward)
                if turn:  # the first turn is a warm-up
                    times.setdefault((kind, system), []).append(took)
        for (kind, system), took in times.items():
            row = {"length": length, "kind": kind, "system": system, "backward": backward}
            rows.append(row | {"milliseconds": statistics.median(took), "range": [min(took), max(took)]})
            what = "both" if backward else "forward"
            print(f"{length:6} {kind:14} {system:6} {what:8} {statistics.median(took):9.1f} ms")
    return rows


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    before = os.getloadavg()
    rows = [row for length in args.lengths for row in measure(args, length)]
    result = {
        "command": ["python", *sys.argv],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor(), "threads": args.threads, "torch": torch.__version__},
        "load": {"before": before, "after": os.getloadavg()},
        "shape": {"batch": 1, "heads": args.heads, "size": args.size, "chunk": args.chunk, "dtype": "float32"},
        "rows": rows,
    }
    path = args.out or RESULTS / f"recurrences-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
