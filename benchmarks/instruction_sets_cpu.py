"""How fast is each instruction set of this CPU, compared with transformers and llama.cpp limited to the same one?

Rates are tokens per second of CPU time on one thread, so that they are valid on a busy machine too, unlike those of
`engine_cpu.py`. On an idle machine `--threads N` uses wall-clock seconds instead. attn's kernels are limited to an
instruction set by ATTN_CPU_ISA, torch by ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA, llama.cpp by providing only its
library for such CPUs. Systems take turns; each rate is the median of the rounds. With GGUF files, llama.cpp and attn's
engine read the same files, attn's in the weight formats `--stored`.

    python benchmarks/instruction_sets_cpu.py MODEL_FOLDER --gguf FILES --llamacpp FOLDER_OF_NODE_MODULES --transformers

The result includes the machine's load before and after, and the instruction sets of the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import write_report

BATCHES = (1, 16, 64)
NEW_TOKENS = {1: 16, 16: 8, 64: 4}
LONG = 1000
SETS = {"avx512": ("avx512", "AVX512_CORE_BF16", "zen4"), "avx2": ("avx2", "AVX2", "haswell")}
"""The names of each instruction set in torch and oneDNN, and that of llama.cpp's library for it."""
NODE = """
import {getLlama} from "node-llama-cpp";
const {model: modelPath, batches, count, long, threads} = JSON.parse(process.argv[2]);
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath});
const seconds = () => {
  const used = process.cpuUsage();
  return threads > 1 ? performance.now() / 1e3 : (used.user + used.system) / 1e6;
};
async function measure(name, prompts, count, tokens) {
  const longest = Math.max(...prompts.map((p) => p.length)) + count + 8;
  const context = await model.createContext({contextSize: longest, sequences: prompts.length, threads,
                                             batchSize: Math.max(512, longest)});
  const sequences = prompts.map(() => context.getSequence());
  const run = async (sequence, prompt) => {
    let made = 0;
    for await (const _ of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) if (++made >= count) break;
  };
  const start = seconds();
  await Promise.all(sequences.map((s, i) => run(s, prompts[i])));
  console.log(JSON.stringify({...name, rate: tokens / (seconds() - start)}));
  await context.dispose();
}
const stem = "The history of the city begins with number ";
for (const batch of batches)
  await measure({batch}, Array.from({length: batch}, (_, i) => model.tokenize(stem + i + ", and the first thing that")),
                count[batch], batch * count[batch]);
const text = (stem + "one, and the first thing that ").repeat(90);
await measure({prompt: long}, [model.tokenize(text).slice(0, long)], 1, long);
"""


def prompts(count: int) -> list[str]:
    return [f"The history of the city begins with number {i}, and the first thing that" for i in range(count)]


def rated(args: argparse.Namespace, run: Any, tokens: int) -> float:
    """Tokens per second of CPU time, or of wall-clock time with several threads."""
    clock = time.perf_counter if args.threads > 1 else time.process_time
    start = clock()
    run()
    return tokens / (clock() - start)


def ours(args: argparse.Namespace, form: str) -> Iterator[dict[str, Any]]:
    from engine_measures import load_form, new_tokens, prefill

    loaded, _ = load_form(args, f"weights={form}")
    new_tokens(loaded, "shared", prompts(1), 2)
    for batch in args.batches:
        new = NEW_TOKENS[batch]
        yield {
            "batch": batch,
            "rate": rated(args, lambda b=batch, n=new: new_tokens(loaded, "shared", prompts(b), n), batch * new),
        }
    yield {"prompt": LONG, "rate": rated(args, lambda: prefill(loaded, "shared"), LONG)}


def transformers(args: argparse.Namespace, dtype: str) -> Iterator[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, dtype))

    def run(batch: int, new: int) -> None:
        inputs = tokenizer(prompts(batch), return_tensors="pt", padding=True)
        model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False)

    run(1, 2)
    for batch in args.batches:
        new = NEW_TOKENS[batch]
        yield {"batch": batch, "rate": rated(args, lambda b=batch, n=new: run(b, n), batch * new)}
    ids = torch.arange(LONG)[None] + 100
    with torch.no_grad():
        yield {"prompt": LONG, "rate": rated(args, lambda: model(ids, logits_to_keep=1), LONG)}


def held_to(instructions: str, threads: int) -> dict[str, str]:
    """The environment variables that limit torch and attn's kernels to this instruction set."""
    torch_name, onednn, _ = SETS[instructions]
    names = {"ATTN_CPU_ISA": instructions, "ATEN_CPU_CAPABILITY": torch_name, "ONEDNN_MAX_CPU_ISA": onednn}
    return os.environ | names | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def child(
    args: argparse.Namespace, instructions: str, system: str, form: str, model: Path | None = None
) -> Iterator[dict[str, Any]]:
    command = [sys.executable, __file__, str(model or args.model), "--child", system, form]
    command += ["--threads", str(args.threads)]
    command += ["--batches", *map(str, args.batches)]
    yield from said(command, held_to(instructions, args.threads))


def llamacpp(args: argparse.Namespace, instructions: str, file: Path) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(args.llamacpp / "node_modules", Path(work) / "node_modules", symlinks=True)
        for library in Path(work).glob("node_modules/@node-llama-cpp/linux-x64/bins/*/libggml-cpu-*.so"):
            if library.stem != f"libggml-cpu-{SETS[instructions][2]}":
                library.unlink()
        (Path(work) / "peer.mjs").write_text(NODE)
        asked = {"model": str(file.resolve()), "batches": args.batches, "count": NEW_TOKENS, "long": LONG}
        asked["threads"] = args.threads
        yield from said(["node", f"{work}/peer.mjs", json.dumps(asked)], dict(os.environ))


def said(command: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    yield from (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    if done.returncode:
        yield {"trouble": f"ended with {done.returncode}"}


def rounds(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rates: dict[tuple[tuple[str, Any], ...], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for instructions in args.sets:
            turns = [("attn", form, child(args, instructions, "attn", form)) for form in args.forms]
            if args.transformers:
                turns += [("transformers", d, child(args, instructions, "transformers", d)) for d in args.dtypes]
            for file in args.gguf:
                said_of = [(form, child(args, instructions, "attn", form, file)) for form in args.stored]
                turns += [("attn", f"{file.stem}, {form}", answers) for form, answers in said_of]
                if args.llamacpp:
                    turns.append(("llama.cpp", file.stem, llamacpp(args, instructions, file)))
            for system, form, answers in turns:
                for row in answers:
                    rate = row.pop("rate", float("nan"))
                    facts = {"instructions": instructions, "system": system, "form": form} | row
                    rates[tuple(facts.items())].append(rate)
                    print(facts, round(rate, 1), file=sys.stderr, flush=True)
    for facts, found in rates.items():
        spread = {"min": round(min(found), 1), "max": round(max(found), 1)}
        rate = "tokens_per_second" if args.threads > 1 else "tokens_per_cpu_second"
        yield dict(facts) | {rate: round(statistics.median(found), 1)} | spread


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=Path, help="model folder in the Hugging Face layout")
    p.add_argument("--gguf", type=Path, nargs="+", default=[], help="the model as GGUF files, for both")
    p.add_argument("--llamacpp", type=Path, help="the folder in which npm installed node-llama-cpp")
    p.add_argument("--transformers", action="store_true", help="measure transformers, of this environment")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--forms", nargs="*", default=["auto", "int8", "int4"])
    p.add_argument("--stored", nargs="+", default=["auto", "int4"], help="how we run the GGUF files")
    p.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS)
    p.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    p.add_argument("--threads", type=int, default=1, help="more than one: seconds of the clock, for a quiet machine")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    p.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        system, form = args.child
        for row in ours(args, form) if system == "attn" else transformers(args, form):
            print(json.dumps(row), flush=True)
        return
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    shown = sorted(flag for flag in flags.split() if flag.startswith(("avx", "amx", "fma", "f16c")))
    facts = {"question": "tokens a second", "threads": args.threads, "flags": shown, "rounds": args.rounds}
    write_report("instruction_sets_cpu", facts, rounds(args), args.out)


if __name__ == "__main__":
    main()
