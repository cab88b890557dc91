"""How fast are the models that people run on a CPU, in attn's engine and in llama.cpp and transformers beside it?

Files have random weights in the shapes of published models (`common_shapes.py`), which read and multiply like real
ones. Every system loads a file once in a process of its own and then takes its turn at each measurement; rates are
medians of the rounds, in tokens per second. Beside each rate is what it amounts to: for decoding, the bytes that are
read for a step (weights once, keys and values of every sequence) per second, as a share of the bandwidth that two
threads copy large arrays with; for prompts, the multiply-adds as a share of the int8 products of this processor's
fastest instruction on all threads. `load` is the seconds from the call that opens the file to a first token of a
prompt of one token, for the first opening and the next, and the memory of the process (PSS, without the file's pages).

    python benchmarks/common_models_cpu.py FOLDER --llamacpp FOLDER_OF_NODE_MODULES --tokenizer MODEL_FOLDER

FOLDER keeps the files (0.7 GB for a model of 1.1 B in Q4_0). `--plot` draws a result instead of measuring.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common_shapes import FILE_TYPES, SHAPES, Shape, file_of
from report import write_report

NODE = """
import {getLlama} from "node-llama-cpp";
import {createInterface} from "readline";
const {model: modelPath, threads, vocabulary} = JSON.parse(process.argv[2]);
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
  const start = performance.now();
  if (op === "load") {
    model ??= await llama.loadModel({modelPath});
    depth = 1, count = 1;
  }
  const sequences = await opened(batch, depth + count + 8).then((c) => Array.from({length: batch}, () => c.getSequence()));
  const begun = performance.now(), firsts = [];
  const run = async (sequence, i) => {
    let made = 0;
    for await (const _ of sequence.evaluate(ids(depth, i), {temperature: 0, yieldEogToken: true})) {
      if (++made === 1) firsts.push(performance.now());
      if (made >= count) break;
    }
  };
  await Promise.all(sequences.map(run));
  const end = performance.now();
  sequences.forEach((s) => s.dispose());
  if (op === "load") return (end - start) / 1e3;
  return op === "prompt" ? (end - begun) / 1e3 : (end - Math.max(...firsts)) / 1e3;
}
for await (const line of createInterface({input: process.stdin}))
  console.log(JSON.stringify({seconds: await measured(JSON.parse(line))}));
process.exit(0);
"""


def ids(count: int, first: int, vocabulary: int) -> list[int]:
    """The prompt of a sequence; sequences differ in their first token, so that no keys are shared."""
    return [300 + first, *(7 + 13 * i % (vocabulary - 500) for i in range(1, count))]


class Ours:
    """attn's engine, in this process."""

    def __init__(self, model: Path, quantization: str, threads: int) -> None:
        import torch
        from attn_models.loading import load_model

        torch.set_num_threads(threads)
        self._load = lambda: load_model(model, quantization=quantization, verify="sizes")
        self._loaded: Any = None

    def __call__(self, op: str, batch: int = 1, depth: int = 1, count: int = 1) -> float:
        """The seconds of a measurement."""
        start = time.perf_counter()
        if op == "load":
            self._loaded = None
            self._loaded = self._load()
        from attn_engine import EngineConfig, Request, SamplingParams, build_engine

        limits = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=batch)
        engine = build_engine(self._loaded.model, None, limits, kv_cache_tokens=batch * (depth + count + 64))
        task = SamplingParams(max_new_tokens=count, ignore_eos=True)
        for i in range(batch):
            prompt = tuple(ids(depth, i, self._loaded.model.vocab_size))
            engine.submit(Request(id=str(i), token_ids=prompt, params=task))
        begun, waiting = time.perf_counter(), {str(i) for i in range(batch)}
        while waiting:
            waiting -= {event.request_id for event in engine.step() if event.delta.tokens}
        first = time.perf_counter()
        while not engine.idle:
            engine.step()
        end = time.perf_counter()
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

        start = time.perf_counter()
        if op == "load":
            found = AutoModelForCausalLM.from_pretrained(
                self._file.parent, gguf_file=self._file.name, dtype=self._dtype, local_files_only=True
            )
            self._model = found.eval()
        model: Any = self._model
        rows = torch.tensor([ids(depth, i, model.config.vocab_size) for i in range(batch)])
        begun = time.perf_counter()
        with torch.inference_mode():
            out = model(rows, use_cache=True, logits_to_keep=1)
            first = time.perf_counter()
            for _ in range(count - 1):
                token = out.logits[:, -1:].argmax(-1)
                out = model(token, past_key_values=out.past_key_values, use_cache=True)
        end = time.perf_counter()
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
