# ruff: noqa: ARG002 - reports take what a loop tells
"""How well and how fast does a small character model train on a CPU, compared with nanoGPT and transformers?

The recipe is nanoGPT's for a CPU: 4 layers, 4 heads, width 128, context 64, batches of 12, 2000 steps, learning rate
1e-3 with cosine decay to 1e-4 after 100 steps of warm-up, no dropout, no bias, on Shakespeare's works.

    python benchmarks/train_cpu.py                          # both parts
    python benchmarks/train_cpu.py --nanogpt FOLDER         # compared with a checkout of nanoGPT
    python benchmarks/train_cpu.py --part quality --nanogpt FOLDER --seeds 3

Quality: whole runs with attn_train's loop, and of nanoGPT's train.py; the validation loss is the mean over random
batches of the last tenth of the text, as in nanoGPT, and over all of it in windows without overlap. Speed: attn's loop
and each peer take turns of some steps in one process, so that other load affects all equally; the rate is that of the
median turn, and ratios are between adjacent turns. Peers are trained by a minimal loop: batches stacked from slices,
gradient clipping, fused AdamW. transformers' Trainer and nanoGPT's train.py use their own loops; the latter is a
process that is stopped during the turns of the others. Time is that of the processor with one thread (without
train.py), else that of the clock. The result, with the machine and its load, is written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
from attn_models.sources import pull_shakespeare
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.process_tuning import keep_freed_memory, spin_briefly
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import derived
from attn_train.tasks.language_modeling import TextDataset, read_text, tokenize
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from torch import nn
from torch.nn import functional

RESULTS = Path(__file__).parent / "results"
CONTEXT, BATCH, WIDTH, LAYERS, HEADS, STEPS = 64, 12, 128, 4, 4, 2000
Turn = Callable[[], float]
"""Trains for a fixed number of steps and returns the seconds taken."""


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--part", choices=["both", "quality", "speed"], default="both")
    p.add_argument("--mechanism", default="gqa")
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--positions", default="rotary")
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--seed", type=int, default=1337)
    p.add_argument("--seeds", type=int, default=1, help="runs of the quality part")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--evaluation-batches", type=int, nargs="+", default=[20, 200])
    p.add_argument("--turns", type=int, default=10)
    p.add_argument("--turn-steps", type=int, default=20)
    p.add_argument("--nanogpt", type=Path, help="folder with nanoGPT's model.py and train.py")
    p.add_argument("--out", type=Path, help="where the result goes; by default a new file in benchmarks/results")
    return p.parse_args()


def recipe(args: argparse.Namespace) -> TrainingConfig:
    return TrainingConfig(
        model=ModelConfig(
            hidden_size=WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=args.kv_heads,
            max_seq_len=CONTEXT,
            mechanism=args.mechanism,
            positions=args.positions,
        ),
        data=DataConfig(dataset="shakespeare"),
        optimizer=OptimizerConfig(
            steps=args.steps,
            batch_size=BATCH,
            learning_rate=1e-3,
            min_learning_rate=1e-4,
            warmup_steps=min(100, args.steps),
        ),
        evaluation=EvaluationConfig(eval_steps=250, eval_batches=20),
        seed=args.seed,
    )


class Progress(NullReporter):
    """Prints validation losses."""

    def metrics(self, step: int, values: Any) -> None:
        """Print the validation loss, if there is one."""
        if "validation_loss" in values:
            print(f"  step {step}: validation loss {values['validation_loss']:.4f}", flush=True)


def measure_quality(args: argparse.Namespace, config: TrainingConfig, text: TextDataset) -> list[dict[str, Any]]:
    """A run for each seed, beside nanoGPT's if its folder is given."""
    found = []
    for seed in range(args.seed, args.seed + args.seeds):
        found.append({"seed": seed, "attn": our_quality(config.replace(seed=seed), text, args.evaluation_batches)})
        if args.nanogpt:
            found[-1]["nanogpt"] = nanogpt_quality(args, text, seed)
        print(json.dumps(found[-1]), flush=True)
    return found


@torch.no_grad()
def whole_loss(logits_of: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> float:
    """The mean loss, in nats, over all windows of a text side by side."""
    count = (len(tokens) - 1) // CONTEXT * CONTEXT
    inputs, targets = (part.long().view(-1, CONTEXT).split(256) for part in (tokens[:count], tokens[1 : count + 1]))
    losses = (
        functional.cross_entropy(logits_of(x).flatten(0, 1), y.flatten(), reduction="sum").item()
        for x, y in zip(inputs, targets, strict=True)
    )
    return sum(losses) / count


def nanogpt_quality(args: argparse.Namespace, text: TextDataset, seed: int) -> dict[str, Any]:
    """A run of train.py with this seed, which it has no option for."""
    with tempfile.TemporaryDirectory() as out:
        folder = Path(out)
        for name in ("model.py", "configurator.py", "train.py"):
            source = (args.nanogpt / name).read_text()
            (folder / name).write_text(source.replace("manual_seed(1337", f"manual_seed({seed}"))
        steps = {"max_iters": args.steps, "lr_decay_iters": args.steps, "eval_interval": args.steps, "eval_iters": 20}
        given = steps | {"warmup_iters": min(100, args.steps), "log_interval": 10**9}
        began = time.perf_counter()
        subprocess.run(nanogpt_command(folder, text, folder, given), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        model = nanogpt_model(args.nanogpt, text)
        model.load_state_dict(torch.load(folder / "ckpt.pt", weights_only=True)["model"])
    loss = whole_loss(lambda tokens: model(tokens, tokens)[0], text.validation)
    return {"validation_loss": loss, "seconds_with_evaluation": seconds, "parameters": parameters(model)}


def parameters(model: nn.Module) -> int:
    """The number of parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def our_quality(config: TrainingConfig, text: TextDataset, batches: list[int]) -> dict[str, Any]:
    model = build_model(config, text)
    trainer = Trainer(model, text, config)
    began = time.perf_counter()
    trainer.run(Progress(), StopFlag())
    seconds = time.perf_counter() - began
    losses = {str(count): trainer.validation_loss(count) for count in batches}
    return {
        "parameters": parameters(model),
        "validation_loss": whole_loss(model, text.validation),
        "validation_loss_by_batches": losses,
        "seconds_of_training": trainer.elapsed,
        "seconds_with_evaluation": seconds,
        "tokens_per_second": config.optimizer.steps * BATCH * CONTEXT / trainer.elapsed,
    }


def clock() -> float:
    """Processor time does not depend on what else runs, but counts threads that wait."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class UntilMetrics(NullReporter):
    """Stops a run at its next metrics."""

    def __init__(self) -> None:
        self.flag = StopFlag()

    def metrics(self, step: int, values: Any) -> None:
        """Stop the run."""
        self.flag.set(Stop.DISCARD)


def our_turns(config: TrainingConfig, text: TextDataset, steps: int) -> Turn:
    """The turns of attn's loop, `steps` steps each, without evaluation."""
    evaluation = config.evaluation.replace(eval_steps=10**9, logging_steps=steps)
    trainer = Trainer(build_model(config, text), text, config.replace(evaluation=evaluation))

    def turn() -> float:
        report, began = UntilMetrics(), clock()
        trainer.run(report, report.flag)
        return clock() - began

    return turn


def peer_turns(
    logits_of: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, tokens: torch.Tensor, steps: int
) -> Turn:
    """The turns of a peer's model with the minimal loop."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)

    def turn() -> float:
        began = clock()
        for _ in range(steps):
            places = torch.randint(len(tokens) - CONTEXT, (BATCH,))
            inputs = torch.stack([tokens[i : i + CONTEXT].long() for i in places])
            targets = torch.stack([tokens[i + 1 : i + 1 + CONTEXT].long() for i in places])
            functional.cross_entropy(logits_of(inputs).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return clock() - began

    return turn


def gpt2(text: TextDataset) -> Any:
    """The GPT-2 of transformers with the recipe's sizes and multi-head attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=text.tokenizer.vocab_size,
        n_positions=CONTEXT,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def transformers_peer(text: TextDataset, steps: int) -> Turn:
    """The turns of transformers' GPT-2 with the minimal torch loop."""
    model = gpt2(text)
    return peer_turns(lambda tokens: model(tokens).logits, model, text.training, steps)


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """All windows of a text with themselves as labels, as transformers' Trainer expects; its models shift labels."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        """The number of windows in the text."""
        return len(self._tokens) - CONTEXT

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        window = self._tokens[place : place + CONTEXT].long()
        return {"input_ids": window, "labels": window}


def transformers_trainer(text: TextDataset, steps: int) -> Turn:
    """The turns of the same GPT-2 with transformers' Trainer; defaults that attn's loop lacks are switched off."""
    from transformers import Trainer as TheirTrainer
    from transformers import TrainingArguments

    given = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="trainer-"),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-3,
        weight_decay=0.1,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    # A random order of all windows would take longer to draw than the steps.
    trainer = TheirTrainer(model=gpt2(text), args=given, train_dataset=Windows(text.training[: 2000 * BATCH]))

    def turn() -> float:
        began = clock()
        trainer.train()
        return clock() - began

    return turn


def nanogpt_peer(folder: Path, text: TextDataset, steps: int) -> Turn:
    """The turns of nanoGPT's own model, with multi-head attention."""
    model = nanogpt_model(folder, text).train()
    # nanoGPT computes the logits of all positions only if it is given targets.
    return peer_turns(lambda tokens: model(tokens, tokens)[0], model, text.training, steps)


def nanogpt_model(folder: Path, text: TextDataset) -> Any:
    """nanoGPT's own model of the recipe's sizes."""
    module = runpy.run_path(str(folder / "model.py"))
    config = module["GPTConfig"](
        block_size=CONTEXT,
        vocab_size=text.tokenizer.vocab_size,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=WIDTH,
        dropout=0.0,
        bias=False,
    )
    return module["GPT"](config)


def nanogpt_command(folder: Path, text: TextDataset, place: Path, options: Mapping[str, Any]) -> list[str]:
    """The command of train.py in a folder, which gets the text as its data, with the recipe for a CPU."""
    data = folder / "data" / "attn-benchmark"
    data.mkdir(parents=True, exist_ok=True)
    for name, tokens in (("train", text.training), ("val", text.validation)):
        tokens.numpy().astype("uint16").tofile(data / f"{name}.bin")
    # train.py reads a dictionary with the vocabulary size, written here in pickle's protocol 0.
    (data / "meta.pkl").write_bytes(f"(dVvocab_size\nI{text.tokenizer.vocab_size}\ns.".encode())
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": CONTEXT, "batch_size": BATCH}
    fixed = {"dataset": "attn-benchmark", "out_dir": place, "device": "cpu", "dtype": "float32", "compile": False}
    shape = {"gradient_accumulation_steps": 1, "dropout": 0.0, "bias": False}
    rates = {"learning_rate": 1e-3, "min_lr": 1e-4, "beta2": 0.99}
    given = {**sizes, **fixed, **shape, **rates, **options}
    return [sys.executable, "-u", "train.py", *(f"--{name}={value}" for name, value in given.items())]


class NanoGPTProcess:
    """A process of nanoGPT's train.py with its recipe for a CPU, which only runs during its turns."""

    def __init__(self, folder: Path, text: TextDataset, place: Path, args: argparse.Namespace) -> None:
        never = {"max_iters": 10**9, "log_interval": 1, "eval_interval": 10**9, "eval_iters": 1}
        command = nanogpt_command(folder, text, place, never)
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        self._steps = args.turn_steps
        self._seconds()
        self._stopped_at = self._stop()

    def _stop(self) -> float:
        os.kill(self._process.pid, signal.SIGSTOP)
        return time.perf_counter()

    def _seconds(self) -> float:
        """The seconds of the next iteration, read from its output."""
        while found := self._process.stdout.readline():  # type: ignore[union-attr]
            if match := re.search(r"time ([0-9.]+)ms", found):
                return float(match[1]) / 1000
        raise SystemExit(f"nanoGPT's train.py ended with {self._process.wait()}")

    def turn(self) -> float:
        """Run the next iterations and return their seconds, without the one in which the process was stopped."""
        waited = time.perf_counter() - self._stopped_at
        os.kill(self._process.pid, signal.SIGCONT)
        while self._seconds() < 0.9 * waited:
            pass
        seconds = sum(self._seconds() for _ in range(self._steps))
        self._stopped_at = self._stop()
        return seconds

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def measure_speed(args: argparse.Namespace, config: TrainingConfig, text: TextDataset) -> dict[str, Any]:
    steps = args.turn_steps
    turns = {
        "attn": our_turns(config, text, steps),
        "transformers": transformers_peer(text, steps),
        "transformers_trainer": transformers_trainer(text, steps),
    }
    with ExitStack() as stack:
        if args.nanogpt:
            turns["nanogpt"] = nanogpt_peer(args.nanogpt, text, steps)
        if args.nanogpt and args.threads > 1:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            process = NanoGPTProcess(args.nanogpt, text, place, args)
            stack.callback(process.end)
            turns["nanogpt_train"] = process.turn
        for turn in turns.values():
            turn()
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(args.turns):
            for name, turn in turns.items():
                seconds[name].append(turn())
    tokens = steps * BATCH * CONTEXT
    rates = {name: {"median": tokens / statistics.median(s), "best": tokens / min(s)} for name, s in seconds.items()}
    ratios = {
        name: statistics.median(theirs / ours for ours, theirs in zip(seconds["attn"], s, strict=True))
        for name, s in seconds.items()
        if name != "attn"
    }
    return {"tokens_per_second": rates, "attn_is_faster_by": ratios}


def again_with_brief_spins() -> None:
    """Restart this program with the OpenMP setting of attn's workers, which is read when torch is imported."""
    if "GOMP_SPINCOUNT" not in os.environ:
        spin_briefly()
        os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606 - itself


def main() -> None:
    args = arguments()
    again_with_brief_spins()
    torch.set_num_threads(args.threads)
    # As attn's workers do. In the speed part the peers benefit from this too, and from the short spinning.
    keep_freed_memory()
    config = recipe(args)
    text = tokenize(read_text([pull_shakespeare(home_folder())]), validation=config.data.validation_fraction)
    result: dict[str, Any] = {
        "benchmark": "train_cpu",
        "command": ["python", *sys.argv],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.processor(), "threads": args.threads, "torch": torch.__version__},
        "config": msgspec.to_builtins(config),
        "text": {"training_tokens": len(text.training), "vocab_size": text.tokenizer.vocab_size},
        "load_before": os.getloadavg(),
    }
    if args.part in ("both", "speed"):
        torch.manual_seed(derived(args.seed, "peers"))
        result["speed"] = measure_speed(args, config, text)
        print(json.dumps(result["speed"], indent=2))
    if args.part in ("both", "quality"):
        result["quality"] = measure_quality(args, config, text)
        print(json.dumps(result["quality"], indent=2))
    result["load_after"] = os.getloadavg()
    out = args.out or RESULTS / f"train_cpu-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(out)


if __name__ == "__main__":
    main()
