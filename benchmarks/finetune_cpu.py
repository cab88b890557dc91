"""How fast are fine-tuning and DPO of SmolLM2-135M on a CPU, compared with TRL, and with how much memory?

    python benchmarks/finetune_cpu.py --task sft       # needs trl, peft and datasets; ATTN_HOME has the model
    python benchmarks/finetune_cpu.py --task sft --whole           # all weights
    python benchmarks/finetune_cpu.py --task dpo
    python benchmarks/finetune_cpu.py --turns 20 --held-out 24     # and the loss of other conversations afterwards
    python benchmarks/finetune_cpu.py --task dpo --turns 20 --held-out 24    # and how many other pairs are won

Both train adapters of rank 8 on the same layers, or with `--whole` all weights, on the same texts (runs of
Shakespeare's works of various lengths; what follows the prompt there is preferred to another run), in one precision,
with the same batch size, each in a process of its own; they take turns of one step. TRL has its best options: no
gradient checkpointing, for SFT packing or batches of similar length, whichever is faster; attn's process keeps freed
memory, as its workers do. Tokens are those of the examples, without padding. Time is that of the processor with one
thread, else that of the clock. The result is the median of the turns, the ratio of adjacent turns, and the peak memory
of each process in GiB.
"""

# ruff: noqa: SLF001
from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attn_schema.home import home_folder, models_folder
from attn_train.process_tuning import keep_freed_memory
from report import write_report

Turn = Callable[[], tuple[float, int]]
"""Trains for one step, and returns its seconds and tokens."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""The logits [1, tokens, vocabulary] of ids [1, tokens] now."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LONGEST = 512


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--task", choices=["sft", "dpo"], default="sft")
    p.add_argument("--whole", action="store_true", help="train all weights")
    p.add_argument("--side", choices=["attn", "trl", "trl-packed"], help="be the process of this side")
    p.add_argument("--precision", choices=["float32", "bfloat16"], default="float32", help="TRL's: bf16, autocast")
    p.add_argument("--model", type=Path, default=models_folder(home_folder()) / "smollm2-135m-instruct")
    p.add_argument("--text", type=Path, default=home_folder() / "texts" / "shakespeare.txt")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--examples", type=int, default=200)
    p.add_argument("--turns", type=int, default=6)
    p.add_argument("--learning-rate", type=float, default=1e-4)
    p.add_argument("--held-out", type=int, default=0, help="further conversations whose loss is measured at the end")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--out", type=Path)
    return p.parse_args()


def clock(args: argparse.Namespace) -> Callable[[], float]:
    """Processor time does not depend on what else runs, but counts threads that wait."""
    return time.process_time if args.threads == 1 else time.perf_counter


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prompts and answers of 20 to 120 words each, as messages."""
    words, draw = args.text.read_text().split(), random.Random(7)

    def said(role: str, start: int | None = None) -> list[dict[str, str]]:
        place = draw.randrange(len(words) - 300) if start is None else start
        return [{"role": role, "content": " ".join(words[place : place + draw.randint(20, 120)])}]

    found = []
    for _ in range(args.examples + args.held_out):
        if args.task == "sft":
            found.append({"prompt": said("user"), "completion": said("assistant")})
        else:
            start = draw.randrange(len(words) - 300)
            prompt = said("user", start)
            following = start + len(prompt[0]["content"].split())
            found.append({"prompt": prompt, "chosen": said("assistant", following), "rejected": said("assistant")})
    return found


def attn(args: argparse.Namespace, data: list[dict[str, Any]], folder: Path) -> tuple[Turn, Logits]:
    from attn_schema.finetuning import LoraConfig
    from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
    from attn_train.base_model import completed, load_base
    from attn_train.data.load import load_dataset
    from attn_train.records import NullReporter
    from attn_train.trainer import Trainer

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    kind = "chat" if args.task == "sft" else "preference"
    asked = TrainingConfig(
        model=ModelConfig(base_model=str(args.model), max_seq_len=LONGEST),
        data=DataConfig(dataset=str(folder / "rows.jsonl"), format=kind, validation_fraction=0.0),
        optimizer=OptimizerConfig(
            steps=1000,
            batch_size=args.batch,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            beta2=0.999,
        ),
        lora=LoraConfig() if args.whole else LoraConfig(lora_rank=8, lora_target_modules=LAYERS),
        precision=args.precision,
        device="cpu",
    )
    config = completed(asked, home=home_folder())
    base = load_base(config, home_folder(), lambda _: None)
    dataset = load_dataset(config, home_folder(), lambda _: None)
    trainer = Trainer(base.model, dataset, config)
    base.model.train()
    drawn: list[int] = []
    own = trainer._task.next_batch

    def counted() -> tuple[torch.Tensor, ...]:
        batch = own()
        drawn.append(int((batch[0] != 0).sum()))
        return batch

    trainer._task.next_batch = counted  # type: ignore[method-assign]

    def turn() -> tuple[float, int]:
        began = clock(args)()
        trainer._one_step(NullReporter())
        return clock(args)() - began, drawn[-1]

    return turn, base.model


def options_of(args: argparse.Namespace, folder: Path, *, packed: bool) -> dict[str, Any]:
    """TRL's best options, beside those that both sides have."""
    options: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": args.batch, "use_cpu": True,
        "learning_rate": args.learning_rate, "lr_scheduler_type": "constant",
        "max_steps": 1000, "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True,
        "gradient_checkpointing": False, "bf16": args.precision == "bfloat16", "max_length": LONGEST,
    }  # fmt: skip
    if packed:
        options |= {"packing": True, "per_device_train_batch_size": max(1, args.batch * 300 // LONGEST)}
    elif args.task == "sft":
        options["train_sampling_strategy"] = "group_by_length"
    return options


def trl(args: argparse.Namespace, data: list[dict[str, Any]], folder: Path, *, packed: bool) -> tuple[Turn, Logits]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    go, done, seen = threading.Semaphore(0), threading.Semaphore(0), [0]

    class Turns(TrainerCallback):  # type: ignore[misc]
        """Waits before each step until it is its turn."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()

    options = options_of(args, folder, packed=packed)
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules=list(LAYERS), task_type="CAUSAL_LM")
    config, kind = (SFTConfig, SFTTrainer) if args.task == "sft" else (DPOConfig, DPOTrainer)
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        train_dataset=Dataset.from_list(data),
        peft_config=None if args.whole else adapter,
        args=config(**options),
        callbacks=[Turns()],
    )
    own = trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        mask = inputs.get("attention_mask")
        seen[0] = int(inputs["input_ids"].numel() if mask is None else mask.sum())
        return own(model, inputs, *rest)

    trainer.training_step = counted
    threading.Thread(target=trainer.train, daemon=True).start()

    def turn() -> tuple[float, int]:
        began = clock(args)()
        go.release()
        done.acquire()
        return clock(args)() - began, seen[0]

    return turn, lambda ids: trainer.model(input_ids=ids).logits


def answers_loss(logits: Logits, args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> list[float]:
    """Of each conversation the sum of the losses, in nats, of its answer's tokens, and then their number."""
    from attn_models.tokenizers import Tokenizer
    from attn_schema.training import DataConfig
    from attn_train.tasks.instruction_tuning import chat_dataset

    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset=str(folder / "held.jsonl"), format="chat", validation_fraction=0.0)
    found, count = [], 0
    for chat in chat_dataset(data, Tokenizer.from_folder(args.model), max_length=2 * LONGEST).training:
        targets = torch.tensor(chat.targets)
        with torch.no_grad():
            given = logits(torch.tensor(chat.inputs)[None])[0]
        found.append(torch.nn.functional.cross_entropy(given, targets, reduction="sum").item())
        count += int((targets != -100).sum())
    return [*found, count]


class HeldOut:
    """Conversations or pairs that are not trained on, of which pairs are judged by the model as it was, too."""

    def __init__(self, logits: Logits, args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> None:
        self._losses = partial(answers_loss, logits, args, folder=folder)
        self._rows = rows
        self._pairs = args.task == "dpo"
        self._reference = self._margins() if self._pairs and rows else []

    def measures(self) -> dict[str, float]:
        """The mean loss of answers' tokens in nats; or DPO's loss, with a beta of 0.1, and the share of pairs whose
        better answer has become likelier beside the other one."""
        if not self._rows:
            return {}
        if not self._pairs:
            *losses, count = self._losses(rows=self._rows)
            return {"held_out_loss": sum(losses) / count}
        gained = torch.tensor(self._margins()) - torch.tensor(self._reference)
        loss = -torch.nn.functional.logsigmoid(0.1 * gained).mean().item()
        return {"held_out_loss": loss, "held_out_accuracy": (gained > 0).float().mean().item()}

    def _margins(self) -> list[float]:
        parts = [
            self._losses(rows=[{"prompt": row["prompt"], "completion": row[name]} for row in self._rows])[:-1]
            for name in ("chosen", "rejected")
        ]
        return [worse - better for better, worse in zip(*parts, strict=True)]


def take_turns(args: argparse.Namespace) -> None:
    """Be one side: train a step for each line of the input, and say what came of it as a line of JSON."""
    torch.set_num_threads(args.threads)
    made_up = rows(args)
    data, held = made_up[: args.examples], made_up[args.examples :]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if args.side == "attn":
            keep_freed_memory()
            turn, logits = attn(args, data, folder)
        else:
            turn, logits = trl(args, data, folder, packed=args.side == "trl-packed")
        others = HeldOut(logits, args, held, folder)
        for _ in sys.stdin:
            print(json.dumps(turn()), flush=True)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(json.dumps({"peak_memory": round(peak, 2), **others.measures()}), flush=True)
        os._exit(0)  # the other trainer waits for its turn


class Side:
    """The process of one side."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, *sys.argv, "--side", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def turn(self) -> tuple[float, int]:
        """Let it train for one step; returns its seconds and tokens."""
        self._given.write("\n")
        self._given.flush()
        seconds, tokens = self._said()
        return seconds, tokens

    def end(self) -> dict[str, float]:
        """End it; returns its peak memory in GiB, and its loss, if that was asked for."""
        self._given.close()
        return dict(self._said())

    @property
    def _given(self) -> Any:
        return self._process.stdin

    def _said(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise SystemExit(f"a side ended with {self._process.wait()}")


def main() -> None:
    args = arguments()
    if args.side:
        take_turns(args)
    names = ["attn", "trl", *(["trl-packed"] if args.task == "sft" else [])]
    sides = {name: Side(name) for name in names}
    for name, side in sides.items():
        print(f"{name}: warm-up, {side.turn()[0]:.2f} s", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.turns):
        for name, side in sides.items():
            seconds, tokens = side.turn()
            rates[name].append(tokens / seconds)
            print(f"{name}: {tokens} tokens in {seconds:.2f} s", flush=True)
    found = []
    for name, each in rates.items():
        ratios = [a / b for a, b in zip(rates["attn"], each, strict=True)]
        facts = {"tokens_per_second": statistics.median(each), "slowest": min(each), "fastest": max(each)}
        facts["attn_is_faster_by"] = statistics.median(ratios)
        found.append({"side": name, **{key: round(value, 2) for key, value in facts.items()}, **sides[name].end()})
    settings = {"batch": args.batch, "threads": args.threads, "weights": "whole" if args.whole else "lora"}
    settings["precision"] = args.precision
    write_report(f"finetune-cpu-{args.task}", settings, found, args.out)


if __name__ == "__main__":
    main()
