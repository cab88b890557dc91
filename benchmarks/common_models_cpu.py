"""How fast are the models that people run on a CPU, in attn's engine and in llama.cpp and transformers beside it?

Files have random weights in the shapes of published models (`common_shapes.py`), which read and multiply like real
ones. Every system loads a file in a process of its own and then takes its turn at each measurement; rates are medians
of the rounds, in tokens per second. A round in which other processes had more than a tenth of a processor is left out;
on a machine that is never quiet, `--processor-time` measures the processor time of one thread.

Beside each rate is what it amounts to: for decoding, the bytes that are read (the weights once for every step, keys and
values as they are kept) as a share of those that a copy of a large tensor moves in the same time; for prompts, the
multiplications and additions of linear layers as a share of those that the chip makes of int16 in registers (a loop of
the kernels' own instruction, compiled for it). `load` is the seconds from the call
that opens a file to a first token, for the first opening and the second; `memory` is that of the process in MB, without
pages of files.

    python benchmarks/common_models_cpu.py FOLDER --llamacpp FOLDER_OF_NODE_MODULES --tokenizer MODEL_FOLDER \\
        --out RESULT.json --plot RESULT.png --seconds 150

FOLDER keeps the files (0.7 GB for a model of 1.1 B in Q4_0). A run is whole in parts: with `--out` of an earlier run,
rows that are there are not measured again, and shares are of the most that the machine reached in any part; `--seconds`
ends it before the first measurement that would begin later.
What does not fit the memory that is free is said instead of measured. `--plot` draws the rates over those of llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from common_shapes import FILE_TYPES, SHAPES, Shape, file_of
from report import write_report

NODE = """
import {getLlama} from "node-llama-cpp";
import {createInterface} from "readline";
const {model: modelPath, threads, vocabulary, processor} = JSON.parse(process.argv[2]);
const worked = () => { const {user, system} = process.cpuUsage(); return (user + system) / 1e3; };
const now = processor ? worked : () => performance.now();
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
let model, context, of = "";
const ids = (count, first) => Array.from({length: count}, (_, i) => i ? 7 + 13 * i % (vocabulary - 500) : 300 + first);
async function opened(batch, tokens) {
  if (of === `${batch} ${tokens}`) return context;
  await context?.dispose();
  of = `${batch} ${tokens}`;
  context = await model.createContext({contextSize: tokens, sequences: batch, threads, batchSize: 512});
  return context;
}
async function measured({op, batch = 1, depth = 1, count = 1}) {
  const start = now();
  if (op === "load") {
    model ??= await llama.loadModel({modelPath});
    depth = 1, count = 1;
  }
  const found = await opened(batch, depth + count + 8);
  const sequences = Array.from({length: batch}, () => found.getSequence());
  const begun = now(), firsts = [];
  const run = async (sequence, i) => {
    let made = 0;
    for await (const _ of sequence.evaluate(ids(depth, i), {temperature: 0, yieldEogToken: true})) {
      if (++made === 1) firsts.push(now());
      if (made >= count) break;
    }
  };
  await Promise.all(sequences.map(run));
  const end = now();
  sequences.forEach((s) => s.dispose());
  if (op === "load") return (end - start) / 1e3;
  return op === "prompt" ? (end - begun) / 1e3 : (end - Math.max(...firsts)) / 1e3;
}
for await (const line of createInterface({input: process.stdin}))
  console.log(JSON.stringify({seconds: await measured(JSON.parse(line))}));
process.exit(0);
"""


clock = time.perf_counter
"""What measures the seconds of this process; `time.process_time` with `--processor-time`."""


def ids(count: int, first: int, vocabulary: int) -> list[int]:
    """The prompt of a sequence; sequences differ in their first token, so that no keys are shared."""
    return [300 + first, *(7 + 13 * i % (vocabulary - 500) for i in range(1, count))]


FORMS = {
    "auto": ("auto", "shared", 4.0),
    "int8": ("int8", "shared", 4.0),
    "auto, float16 rows": ("auto", "float16", 2.0),
    "auto, int8 rows": ("auto", "int8", 1.0),
}
"""The quantization of weights, the KV cache, and the bytes of a number in it, by the name of a form."""


class Ours:
    """attn's engine, in this process."""

    def __init__(self, model: Path, form: str, threads: int) -> None:
        import torch
        from attn_models.loading import load_model

        torch.set_num_threads(threads)
        quantization, self._kv_cache, _ = FORMS[form]
        self._load = lambda: load_model(model, quantization=quantization, verify="sizes")
        self._loaded: Any = None

    def __call__(self, op: str, batch: int = 1, depth: int = 1, count: int = 1) -> float:
        """The seconds of a measurement."""
        start = clock()
        if op == "load":
            self._loaded = None
            self._loaded = self._load()
        from attn_engine import EngineConfig, Request, SamplingParams, build_engine

        # Random weights repeat themselves, so that drafts would be accepted as they are of no real model.
        sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": batch, "num_speculative_tokens": 0}
        limits = EngineConfig(**sizes, kv_cache=self._kv_cache)
        engine = build_engine(self._loaded.model, None, limits, kv_cache_tokens=batch * (depth + count + 64))
        task = SamplingParams(max_new_tokens=count, ignore_eos=True)
        for i in range(batch):
            prompt = tuple(ids(depth, i, self._loaded.model.vocab_size))
            engine.submit(Request(id=str(i), token_ids=prompt, params=task))
        begun, waiting = clock(), {str(i) for i in range(batch)}
        while waiting:
            waiting -= {event.request_id for event in engine.step() if event.delta.tokens}
        first = clock()
        while not engine.idle:
            engine.step()
        end = clock()
        return end - start if op == "load" else first - begun if op == "prompt" else end - first


class Transformers:
    """transformers in bfloat16, in this process; it dequantizes GGUF files when it loads them."""

    def __init__(self, model: Path, dtype: str, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self._file, self._dtype, self._model = model, getattr(torch, dtype), None

    def __call__(self, op: str, batch: int = 1, depth: int = 1, count: int = 1) -> float:
        """The seconds of a measurement."""
        import torch
        from transformers import AutoModelForCausalLM

        start = clock()
        if op == "load":
            found = AutoModelForCausalLM.from_pretrained(
                self._file.parent, gguf_file=self._file.name, dtype=self._dtype, local_files_only=True
            )
            self._model = found.eval()
        model: Any = self._model
        rows = torch.tensor([ids(depth, i, model.config.vocab_size) for i in range(batch)])
        begun = clock()
        with torch.inference_mode():
            out = model(rows, use_cache=True, logits_to_keep=1)
            first = clock()
            for _ in range(count - 1):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
        end = clock()
        return end - start if op == "load" else first - begun if op == "prompt" else end - first


SYSTEMS = {"attn": Ours, "transformers": Transformers}


def serve(args: argparse.Namespace) -> None:
    """Answer measurements that come as JSON lines."""
    system, form, model = args.child
    run = SYSTEMS[system](Path(model), form, args.threads)
    for line in sys.stdin:
        print(json.dumps({"seconds": run(**json.loads(line))}), flush=True)


class Child:
    """A system in a process of its own, which measures when it is asked to."""

    def __init__(self, command: list[str], threads: int) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, **measurement: Any) -> tuple[float, float]:
        """The seconds of a measurement, and the processors that others kept busy during it; raises `RuntimeError` if
        the process ends."""
        assert self._process.stdin is not None  # noqa: S101
        assert self._process.stdout is not None  # noqa: S101
        start, before = time.perf_counter(), self._others()
        self._process.stdin.write(json.dumps(measurement) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                busy = (self._others() - before) / (time.perf_counter() - start)
                return float(json.loads(line)["seconds"]), round(max(0.0, busy), 2)
        raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")

    def _others(self) -> float:
        """The seconds that all processors have worked for other processes, or were taken from this machine."""
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
        own = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        return (user + nice + system + sum(interrupts) - sum(map(int, own))) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """The memory of the process in MB without pages of files: private and shared anonymous pages."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        kept = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
        return round(kept["Pss_Anon:"] / 1e3, 1)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


PEAK = """
#include "simd.hpp"
extern "C" void products(int64_t rounds, int threads, const int8_t* inputs, int32_t* out) {
#pragma omp parallel num_threads(threads)
  {
    const Ints codes = all_ints(7);
    Ints sums[6] = {codes, codes, codes, codes, codes, codes};
    for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 6
      for (int j = 0; j < 6; j++) sums[j] = add_pairs(sums[j], codes, fours_of(inputs + i % 64 + 4 * j));
    Ints whole = sums[0];
    for (int j = 1; j < 6; j++) whole = add_ints(whole, sums[j]);
#pragma omp atomic
    *out += sum_of_ints(whole);
  }
}
"""

MEASUREMENTS = {
    "decode, batch 1": {"op": "decode", "batch": 1, "depth": 16, "count": 20},
    "decode, batch 8": {"op": "decode", "batch": 8, "depth": 16, "count": 10},
    "decode, batch 32": {"op": "decode", "batch": 32, "depth": 16, "count": 5},
    "prompt of 512": {"op": "prompt", "depth": 512},
    "prompt of 2048": {"op": "prompt", "depth": 2048},
    "prompt of 8192": {"op": "prompt", "depth": 8192},
    "decode at 2048": {"op": "decode", "batch": 1, "depth": 2048, "count": 16},
    "decode at 8192": {"op": "decode", "batch": 1, "depth": 8192, "count": 16},
}
BUSY = 0.1
"""The processors that others may keep busy during a round that counts."""


def tokens_of(measurement: dict[str, Any]) -> int:
    if measurement["op"] == "prompt":
        return int(measurement["depth"])
    return int(measurement["batch"]) * (int(measurement["count"]) - 1)


def fastest(run: Callable[[], object]) -> float:
    """The seconds of the fastest of some runs."""
    taken = []
    for _ in range(6):
        start = clock()
        run()
        taken.append(clock() - start)
    return min(taken)


def peak_of_products(threads: int, work: Path) -> float:
    """10^9 multiplications and additions of int16 a second, each counted, in registers."""
    import ctypes

    from attn_kernels_cpu import chip, compiling

    program, isa, source, library = compiling.compiler(), chip.candidates()[0], work / "peak.cpp", work / "peak.so"
    source.write_text(PEAK)
    options = [*compiling.OPTIONS, *isa.options, "-I", str(compiling.SOURCES)]
    subprocess.run([str(program), *options, str(source), "-o", str(library)], check=True)
    products, rounds = ctypes.CDLL(str(library)).products, 1 << 22
    inputs, out = ctypes.create_string_buffer(128), ctypes.c_int32()
    seconds = fastest(lambda: products(ctypes.c_int64(rounds), threads, inputs, ctypes.byref(out)))
    return 2 * 32 * 6 * rounds * threads / seconds / 1e9


def ceilings(threads: int, work: Path) -> dict[str, float]:
    """What this machine can do: GB/s that a copy moves, and 10^9 multiplications and additions of int16 a second."""
    import torch

    torch.set_num_threads(threads)
    source, target = torch.zeros(1 << 27), torch.ones(1 << 27)
    copied = 2 * source.nbytes / fastest(lambda: target.copy_(source)) / 1e9
    return {"copy_gb_s": round(copied, 1), "int16_gop_s": round(peak_of_products(threads, work))}


def shares(
    shape: Shape, size: int, measurement: dict[str, Any], row: dict[str, Any], most: dict[str, float]
) -> dict[str, float]:
    """The share of the machine's bandwidth or products that a row's rate amounts to, for a file of `size` bytes."""
    rate, (_, _, number) = row["rate"], FORMS.get(row["system"].removeprefix("attn, "), FORMS["auto"])
    if measurement["op"] == "prompt":
        linear = shape.multiplied - shape.vocabulary * shape.width
        return {"share_of_int16": round(2 * linear * rate / 1e9 / most["int16_gop_s"], 3)}
    kept = bytes_of_keys(shape, measurement | {"count": 0}) / 4 * number
    read = size * shape.multiplied / sum(o * i for _, o, i in shape.matrices()) + kept
    return {"share_of_copy": round(read * rate / measurement["batch"] / 1e9 / most["copy_gb_s"], 3)}


def commands(args: argparse.Namespace, file: Path, work: Path, vocabulary: int) -> Iterator[tuple[str, list[str]]]:
    """The systems that measure this file, with the commands that start them."""
    own = [sys.executable, __file__, str(file.parent), "--threads", str(args.threads)]
    own += ["--processor-time", "--child"] if args.processor_time else ["--child"]
    for form in args.forms:
        yield f"attn, {form}", [*own, "attn", form, str(file)]
    if args.llamacpp:
        given = {"model": str(file), "threads": args.threads, "vocabulary": vocabulary}
        given["processor"] = args.processor_time
        yield "llama.cpp", ["node", str(work / "peer.mjs"), json.dumps(given)]
    if args.transformers:
        yield "transformers, bfloat16", [*own, "transformers", "bfloat16", str(file)]


def bytes_of_keys(shape: Shape, measurement: dict[str, Any]) -> int:
    """The bytes of the keys and values, in float32, that a measurement keeps at its end."""
    tokens = measurement["depth"] + measurement.get("count", 1)
    return 2 * shape.layers * shape.kv_heads * shape.head_size * 4 * tokens * int(measurement.get("batch", 1))


def rows(args: argparse.Namespace, most: dict[str, float], work: Path) -> Iterator[dict[str, Any]]:
    """The rows that `args.known` lacks."""
    if args.llamacpp:
        (work / "node_modules").symlink_to((args.llamacpp / "node_modules").resolve())
        (work / "peer.mjs").write_text(NODE)
    known = {(row["model"], row["file"], row["what"]) for row in args.known}
    for name in args.models:
        for file_type in args.files:
            asked = [what for what in args.measure if (name, file_type, what) not in known]
            if asked and time.monotonic() < args.until:
                yield from rows_of_file(args, name, file_type, asked, most, work)


def rows_of_file(
    args: argparse.Namespace, name: str, file_type: str, asked: list[str], most: dict[str, float], work: Path
) -> Iterator[dict[str, Any]]:
    shape, file = SHAPES[name], file_of(name, file_type, args.folder, args.tokenizer)
    size, facts = file.stat().st_size, {"model": name, "file": file_type}
    started = dict(commands(args, file, work, shape.vocabulary))
    # transformers dequantizes the file, to bfloat16.
    weights = 2 * sum(outputs * inputs for _, outputs, inputs in shape.matrices()) if args.transformers else 0
    free, needed = psutil.virtual_memory().available, size + weights
    fits = [what for what in asked if needed + len(started) * bytes_of_keys(shape, MEASUREMENTS[what]) < free]
    for what in asked:
        if what not in fits:
            yield facts | {"what": what, "skipped": f"does not fit the {free / 1e9:.1f} GB of memory that are free"}
    children = {system: Child(command, args.threads) for system, command in started.items()} if fits else {}
    facts["megabytes"] = round(size / 1e6, 1)
    try:
        for system, child in children.items():
            loads = [round(child.ask(op="load")[0], 2) for _ in range(2)]
            if not any(row["what"] == "load" and facts.items() <= row.items() for row in args.known):
                yield facts | {"system": system, "what": "load", "seconds": loads, "memory": child.memory()}
        for row in in_turn(args, fits, children):
            measured = MEASUREMENTS[row["what"]]
            share = shares(shape, size, measured, row, most) if row["rate"] else {}
            yield facts | row | share | {"load": round(os.getloadavg()[0], 1)}
    finally:
        for child in children.values():
            child.close()


def in_turn(args: argparse.Namespace, asked: list[str], children: dict[str, Child]) -> Iterator[dict[str, Any]]:
    """A row for each system and measurement; the rate is 0 if no round was quiet."""
    for what in asked:
        if time.monotonic() > args.until:
            return
        measurement, rates = MEASUREMENTS[what], defaultdict[str, list[float]](list)
        for turn in range(args.rounds + 1):
            for system, child in children.items():
                seconds, others = child.ask(**measurement)
                if turn and (others <= BUSY or args.processor_time):  # the first round warms up
                    rates[system].append(tokens_of(measurement) / seconds)
        peer = statistics.median(rates["llama.cpp"] or [0.0])
        for system in children:
            rate = statistics.median(rates[system] or [0.0])
            beside = {"over_llama_cpp": round(rate / peer, 2)} if peer else {}
            spread = [round(value, 1) for value in sorted(rates[system])]
            yield {"system": system, "what": what, "rate": round(rate, 1), "rounds": spread} | beside


def plot(measured: list[dict[str, Any]], path: Path) -> None:
    """Draw the rates of attn over those of llama.cpp: a panel for each file type, bars for models and measurements."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    beside = [row for row in measured if row.get("over_llama_cpp") and row["system"] == "attn, auto"]
    types = [name for name in FILE_TYPES if any(row["file"] == name for row in beside)]
    figure, panels = plt.subplots(max(1, len(types)), squeeze=False, figsize=(11, 3 * max(1, len(types))), sharex=True)
    models = [name for name in SHAPES if any(row["model"] == name for row in beside)]
    for panel, file_type in zip(panels[:, 0], types, strict=False):
        for place, model in enumerate(models):
            found = {
                row["what"]: row["over_llama_cpp"]
                for row in beside
                if (row["model"], row["file"]) == (model, file_type)
            }
            at = [i + (place - len(models) / 2) / (len(models) + 1) for i in range(len(MEASUREMENTS))]
            panel.bar(
                at, [found.get(what, 0) for what in MEASUREMENTS], 1 / (len(models) + 1), align="edge", label=model
            )
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set(title=file_type, ylabel="attn / llama.cpp")
        panel.set_xticks(range(len(MEASUREMENTS)), MEASUREMENTS, fontsize=8)
        panel.legend(fontsize=7, ncols=4)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="where the files are kept")
    p.add_argument("--models", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != "llama-1.1b"])
    p.add_argument("--files", nargs="+", choices=FILE_TYPES, default=list(FILE_TYPES))
    p.add_argument("--measure", nargs="+", choices=MEASUREMENTS, default=list(MEASUREMENTS))
    p.add_argument("--tokenizer", type=Path, help="a model folder with the tokenizer that files get")
    p.add_argument("--llamacpp", type=Path, help="the folder in which npm installed node-llama-cpp")
    p.add_argument("--transformers", action="store_true", help="measure transformers in bfloat16, too")
    p.add_argument("--forms", nargs="+", choices=FORMS, default=["auto", "int8"], help="weights and rows of attn's")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--processor-time", action="store_true", help="seconds of one thread's work, on a busy machine")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    p.add_argument("--seconds", type=float, default=float("inf"), help="begin no measurement after so many seconds")
    p.add_argument("--plot", type=Path, help="where a picture of the rates over those of llama.cpp goes, a PNG")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return p


def main() -> None:
    p = parser()
    args = p.parse_args()
    global clock  # noqa: PLW0603 -- one for the process
    clock = time.process_time if args.processor_time else time.perf_counter
    if args.child:
        return serve(args)
    cores = len(os.sched_getaffinity(0))
    if args.threads > cores:
        p.error(f"--threads: {args.threads} is more than the {cores} cores that this process may use")
    if args.processor_time and args.threads > 1:
        p.error("--processor-time: only with --threads 1, as threads work while they wait for one another")
    if args.plot and not args.out:
        p.error("--plot: only with --out")
    if args.tokenizer is None:
        p.error("--tokenizer: needed, for the vocabulary of the files")
    args.until = time.monotonic() + args.seconds
    now = {"threads": args.threads, "processor_time": args.processor_time}
    earlier = json.loads(args.out.read_text()) if args.out and args.out.exists() else now | {"rows": []}
    if any(earlier[name] != value for name, value in now.items()):
        p.error(f"--out: {args.out} was measured with other --threads or --processor-time; give another file")
    args.known = [row for row in earlier["rows"] if "skipped" not in row]
    with tempfile.TemporaryDirectory() as work:
        reached = ceilings(args.threads, Path(work))
        most = {name: max(value, earlier.get(name, 0)) for name, value in reached.items()}
        facts = {"question": "tokens a second", **now, **most}
        write_report("common_models_cpu", facts, chain(args.known, rows(args, most, Path(work))), args.out)
    if args.plot:
        plot(json.loads(args.out.read_text())["rows"], args.plot)
    return None


if __name__ == "__main__":
    main()
