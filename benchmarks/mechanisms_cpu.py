"""How much faster than dense attention are mechanisms on a CPU, and how much less memory do they need?

Compares each mechanism's layer, at each length, with up to three others in the same run: `dense` is multi-head
attention with torch's fused kernel, causal if the mechanism is; `masked` is the same fused kernel with the mechanism's
mask as a tensor, for specs with a mask; `peer` is another package's layer, if one is known and installed.
With `--decode`, decode steps are measured instead, and `dense` is the step of grouped-query attention. Options
`num_kv_heads`, `head_dim` and `rotary` (the fraction of a head that is turned) also hold for `dense`.

    python benchmarks/mechanisms_cpu.py sliding_window bigbird=block:64,random:3 --lengths 1024 4096

Every measurement runs in a process of its own; systems take turns, so that other load affects all equally. Seconds, of
the processor where there is one thread, are medians of the repeats of all turns after one warm-up call; memory is the
increase of the process's peak during the first call. `ratio` is the seconds of `dense` divided by those of the system:
above 1 is faster than dense. The result, with the machine and its load before and after, is written to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers_layers
from report import write_report

MECHANISMS = (
    "sliding_window",
    "dilated_window=window:256",
    "longformer",
    "bigbird",
    "neighborhood",
    "chunked=chunk:512",
    "block_local",
    "attention_sinks=window:252",
    "strided=stride:64",
    "fixed",
    "linear",
    "forgetting",
    "nsa",
    "moba",
)
SHARED = ("num_kv_heads", "head_dim", "rotary")
"""What is said like an option, but holds for `dense`, too."""
SYSTEMS = ("attn", "dense", "masked", "peer")


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("mechanisms", nargs="*", default=list(MECHANISMS), metavar="NAME[=OPTION:VALUE,...]")
    p.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    p.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    p.add_argument("--hidden-size", type=int, default=512)
    p.add_argument("--num-heads", type=int, default=8)
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--turns", type=int, default=2, help="processes of each system, which take turns")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--training", action="store_true", help="measure a forward and a backward, not a forward alone")
    p.add_argument("--decode", action="store_true", help="measure decode steps after so many tokens, beside gqa's")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    p.add_argument("--one", help=argparse.SUPPRESS)
    return p.parse_args()


def parsed(said: str) -> tuple[str, dict[str, Any]]:
    """Parse a mechanism's name and options from `name=option:value,...`."""
    name, _, rest = said.partition("=")
    pairs = [pair.split(":", 1) for pair in rest.split(",") if pair]
    return name, {option: json.loads(value) for option, value in pairs}


def measure(task: dict[str, Any]) -> dict[str, Any] | None:
    """Measure one system at one length in this process; None if the mechanism has no such system."""
    if task["decode"]:
        return measure_step(task)
    import torch

    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    layer = layer_of(task)
    if layer is None:
        return None
    rows = torch.randn(task["batch"], task["length"], task["hidden_size"])

    def call() -> None:
        if not task["training"]:
            with torch.inference_mode():
                layer(rows)
            return
        given = rows.clone().requires_grad_()
        layer(given).sum().backward()

    before = peak_bytes()
    call()
    added = peak_bytes() - before
    return {"times": timed(call, task["repeats"]), "peak_bytes": added}


def measure_step(task: dict[str, Any]) -> dict[str, Any]:
    """Measure decode steps of a layer after `length` cached tokens; `dense` is gqa with a quarter of the heads.

    Compiled kernels that read the cache in place are loaded, as packed weights load them where a model is served.
    `read_bytes` are the weights, index keys and cached rows that a step reads at least, and `rate` is how fast it does,
    relative to a sum over more memory than the caches of the processor hold.
    """
    import torch
    from attn_core import RaggedBatch, installed
    from attn_core.stores import StoreSize
    from attn_kernels_cpu.library import library

    library()
    torch.set_num_threads(task["threads"])
    torch.manual_seed(0)
    dense, batch, length = task["system"] == "dense", task["batch"], task["length"]
    mechanism = installed().mechanisms.get("gqa" if dense else task["name"])
    config = config_of(mechanism, task, {} if dense else task["options"], length + 1)
    layer, states = mechanism.build(config).eval(), mechanism.state(config)
    room = StoreSize(tokens=batch * (length + 64), requests=batch)
    store = installed().caches.get("paged").create({"layer": states}, room)

    def step(requests: list[int], new: int, context: int) -> None:
        ragged = RaggedBatch.of([new] * len(requests), [context] * len(requests), torch.tensor)
        rows = torch.randn(new * len(requests), task["hidden_size"])
        layer.step(rows, ragged, store.view(ragged, requests)["layer"])

    requests = list(range(batch))
    with torch.inference_mode():
        for request in requests:
            store.admit(request)
            store.reserve(request, length + 1)
            for start in range(0, length, 512):
                step([request], min(512, length - start), start)
        seconds = timed(lambda: step(requests, 1, length), 4 * task["repeats"])
        memory = torch.ones(1 << 26)
        speed = memory.nbytes / statistics.median(timed(memory.sum, 5))
    weights = sum(weight.nbytes for weight in layer.parameters())
    read = weights + batch * sum(least_read(config, spec, length) for spec in states.values())
    return {"times": seconds, "peak_bytes": 0, "read_bytes": read, "rate": read / statistics.median(seconds) / speed}


def config_of(mechanism: Any, task: dict[str, Any], options: dict[str, Any], longest: int) -> Any:
    """The config of a mechanism's layer, with what is said of `SHARED`; for decode steps a quarter of the heads have
    keys and values of their own, unless it is said how many."""
    from attn_core import Capability, Rotary, configure

    sizes: dict[str, Any] = {"hidden_size": task["hidden_size"], "num_heads": task["num_heads"], "max_seq_len": longest}
    said = {name: task["options"][name] for name in SHARED if name in task["options"]}
    if mechanism.can(Capability.GROUPED):
        usual = max(1, task["num_heads"] // 4) if task["decode"] else task["num_heads"]
        sizes["num_kv_heads"] = said.get("num_kv_heads", usual)
    if mechanism.can(Capability.HEAD_DIM) and "head_dim" in said:
        sizes["head_dim"] = said["head_dim"]
    if mechanism.can(Capability.ROTARY) and "rotary" in said:
        sizes["rotary"] = Rotary(fraction=said["rotary"])
    own = {name: value for name, value in options.items() if name not in SHARED}
    return configure(mechanism, own, causal=mechanism.can(Capability.CAUSAL), **sizes)


def least_read(config: Any, spec: Any, length: int) -> int:
    """The bytes of a state that one request has to read: of selected tokens only, but for what they are selected by."""
    chosen = getattr(config, "top", None)
    if chosen is None:
        return int(spec.bytes(length, 0, "float32"))
    tokens = min(length, chosen * getattr(config, "block", 1))
    read = {name: length if name == "index" else tokens for name in spec.fields}
    return sum(field.bytes("float32") * read[name] for name, field in spec.fields.items())


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each of some calls, after one that is not measured; those of the processor with one thread."""
    import torch

    now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    found = []
    for _ in range(repeats + 1):
        start = now()
        call()
        found.append(now() - start)
    return found[1:]


def peak_bytes() -> int:
    """The peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def layer_of(task: dict[str, Any]) -> Callable[..., Any] | None:
    """The layer of a system for a mechanism, or None if the mechanism has no such system."""
    from attn_core import installed

    mechanism = installed().mechanisms.get(task["name"])
    config = config_of(mechanism, task, task["options"], task["length"])
    if task["system"] == "peer":
        if task["name"] in transformers_layers.FAMILIES:
            return transformers_layers.layer_of(task["name"], config)
        return PEERS[task["name"]](config) if task["name"] in PEERS else None
    if task["system"] == "dense":
        dense = installed().mechanisms.get("mha")
        layer = dense.build(config_of(dense, task, {}, task["length"]))
        layer.use_kernel("torch_sdpa")
        return layer
    layer = mechanism.build(config)
    if task["system"] == "masked":
        spec = mechanism.spec(config)
        if spec is None or spec.mask.kind in {"full", "causal"} or not hasattr(layer, "use_kernel"):
            return None
        layer.use_kernel("torch_sdpa")
    return layer


def longformer(config: Any) -> Callable[..., Any]:
    """The self-attention of transformers' Longformer; lengths must be multiples of the window."""
    import torch
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    sizes = {"hidden_size": config.hidden_size, "num_attention_heads": config.num_heads}
    layer = LongformerSelfAttention(LongformerConfig(attention_window=[config.window], **sizes), 0).eval()

    def call(rows: Any) -> Any:
        mask = torch.zeros(rows.shape[:2])
        mask[:, list(config.global_positions)] = 10000.0
        return layer(rows, mask, mask < 0, mask > 0, bool(config.global_positions))[0]

    return call


def bigbird(config: Any) -> Callable[..., Any]:
    """The block-sparse attention of transformers' BigBird, in training mode, the only one with random blocks."""
    import torch
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    sizes = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": 1 << 16,
    }
    own = {"block_size": config.block, "num_random_blocks": config.random, "attention_probs_dropout_prob": 0.0}
    layer = BigBirdBlockSparseAttention(BigBirdConfig(use_bias=False, **sizes, **own), seed=0).train()

    def call(rows: Any) -> Any:
        masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(rows.shape[:2]), config.block)
        whole, band, start, end = masks
        return layer(rows, band, start, end, whole, whole)[0]

    return call


def block_local(config: Any) -> Callable[..., Any]:
    """The attention of the package local-attention, with the projections of attn's layer."""
    from attn_core import installed
    from local_attention import LocalAttention

    layer = installed().mechanisms.get("block_local").build(config)
    attend = LocalAttention(window_size=config.block, causal=config.causal, use_rotary_pos_emb=False)

    def call(rows: Any) -> Any:
        query, key, value = (part.transpose(1, 2) for part in layer.project(rows, None))
        return layer.output(attend(query, key, value).transpose(1, 2).flatten(-2))

    return call


def forgetting(config: Any) -> Callable[..., Any]:
    """fla-core's plain torch function with attn's projections, run from its file, as importing fla needs Triton."""
    import runpy
    from importlib.metadata import distribution

    from attn_core import installed

    layer = installed().mechanisms.get("forgetting").build(config)
    path = distribution("fla-core").locate_file("fla/ops/forgetting_attn/naive.py")
    attend = runpy.run_path(str(path))["naive_forgetting_attn"]

    def call(rows: Any) -> Any:
        query, key, value = layer.project(rows, None)
        return layer.output(attend(query, key, value, layer.inner.remember(rows, None)["gate"]).flatten(-2))

    return call


def nsa(config: Any) -> Callable[..., Any]:
    """The layer of native-sparse-attention-pytorch with the same sizes, without Triton."""
    from native_sparse_attention_pytorch import SparseAttention

    sizes = {
        "dim": config.hidden_size,
        "dim_head": config.hidden_size // config.num_heads,
        "heads": config.num_heads,
        "causal": True,
    }
    blocks = {"compress_block_size": config.compress, "compress_block_sliding_stride": config.stride}
    chosen = {"selection_block_size": config.select, "num_selected_blocks": config.top}
    layer: Callable[..., Any] = SparseAttention(sliding_window_size=config.window, **sizes, **blocks, **chosen).eval()
    return layer


PEERS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "longformer": longformer,
    "bigbird": bigbird,
    "block_local": block_local,
    "forgetting": forgetting,
    "nsa": nsa,
}


def in_own_process(task: dict[str, Any]) -> dict[str, Any] | None:
    """Measure in a new process; a process that fails is reported as `failed` with its exit status."""
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(task["threads"])}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=environment)
    if done.returncode:
        return {"failed": done.returncode}
    found: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shared = {
        name: getattr(args, name)
        for name in ("hidden_size", "num_heads", "batch", "repeats", "threads", "training", "decode")
    }
    for said in args.mechanisms:
        name, options = parsed(said)
        for length in args.lengths:
            task = shared | {"name": name, "options": options, "length": length}
            systems = ("dense", "attn") if args.decode else tuple(dict.fromkeys(("dense", *args.systems)))
            turns = [
                {system: in_own_process(task | {"system": system}) for system in systems} for _ in range(args.turns)
            ]
            found = {system: pooled([turn[system] for turn in turns]) for system in systems}
            for system, row in found.items():
                if row is not None:
                    where = {"mechanism": name, "options": options, "length": length, "system": system}
                    yield where | row | compared(row, found["dense"])


def pooled(rows: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Merge the rows of several processes: the median and range of all times, and the largest peak memory."""
    measured = [row for row in rows if row is not None]
    failed = [row for row in measured if "failed" in row]
    if failed or not measured:
        return failed[0] if failed else None
    seconds = [time for row in measured for time in row["times"]]
    peak = max(row["peak_bytes"] for row in measured)
    rates = {
        name: statistics.median(row[name] for row in measured) for name in ("read_bytes", "rate") if name in measured[0]
    }
    times = {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {**times, "peak_bytes": peak, **rates}


def compared(row: dict[str, Any], dense: dict[str, Any] | None) -> dict[str, float]:
    """How many times faster than dense attention a row is, and how many times less memory it needs."""
    if dense is None or "failed" in row or "failed" in dense:
        return {}
    memory = round(dense["peak_bytes"] / max(1, row["peak_bytes"]), 2)
    return {"ratio": round(dense["seconds"] / row["seconds"], 2), "memory_ratio": memory}


def main() -> None:
    args = arguments()
    if args.one:
        print(json.dumps(measure(json.loads(args.one))))
        return
    facts = {
        "question": "time and memory of mechanisms on a CPU, beside dense fused attention",
        "threads": args.threads,
    }
    write_report("mechanisms_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
