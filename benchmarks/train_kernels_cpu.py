"""Where does a training step on a CPU spend its time, and how much faster is attn's than plain torch?

The two recipes of nanoGPT for Shakespeare's characters: `cpu` (4 layers, 4 heads, width 128, context 64, batches of 12)
and `char` (6 layers, 6 heads, width 384, context 256, batches of 64, reduced by --batch). The peer is nanoGPT's own
model (LayerNorm without bias, GELU, learned positions, torch's fused attention) in a minimal loop with torch's fused
AdamW; attn's model has the same layers. For the peer, bfloat16 means torch.autocast.

    python benchmarks/train_kernels_cpu.py --nanogpt FOLDER                  # shares of a step, then times
    python benchmarks/train_kernels_cpu.py --nanogpt FOLDER --recipe char --batch 8

Times are processor seconds of one thread, which depend least on other load. The peer, attn's loop with torch's kernels
only, and attn's loop take turns; ratios are medians over adjacent turns.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from attn_kernels_cpu.chip import statement
from attn_models.sources import pull_shakespeare
from attn_schema.home import home_folder
from attn_schema.training import DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.process_tuning import keep_freed_memory
from attn_train.tasks.language_modeling import TextDataset, read_text, tokenize
from attn_train.trainer import NullReporter, Trainer
from attn_train.worker import build_model
from report import machine
from torch import nn

Step = Callable[[], object]
PARTS = {
    "attention": ("flash_attention", "scaled_dot", "Attention"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "Linear"),
    "norms": ("layer_norm", "rms_norm"),
    "activations": ("gelu", "silu", "Activated"),
    "dropout": ("dropout", "bernoulli"),
    "losses": ("cross_entropy", "nll_loss", "log_softmax"),
    "optimizer": ("adamw", "Optimizer"),
    "gradient norm": ("_foreach_norm", "linalg_vector_norm"),
}
"""The parts of a step, with substrings of the names of torch's operations and of attn's backward functions."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a recipe."""

    layers: int
    width: int
    context: int
    batch: int

    @property
    def heads(self) -> int:
        """The number of heads, which equals the number of layers in both recipes."""
        return self.layers


RECIPES = {"cpu": Sizes(4, 128, 64, 12), "char": Sizes(6, 384, 256, 64)}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--nanogpt", type=Path, required=True, help="folder with nanoGPT's model.py")
    p.add_argument("--recipe", choices=list(RECIPES), default="cpu")
    p.add_argument("--batch", type=int, help="sequences of a batch, by default the recipe's")
    p.add_argument("--precision", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--turns", type=int, default=7)
    p.add_argument("--turn-steps", type=int, default=10)
    p.add_argument("--profiled-steps", type=int, default=10)
    p.add_argument("--out", type=Path, help="where the result goes, besides the terminal")
    return p.parse_args()


def ours(sizes: Sizes, text: TextDataset, precision: str) -> Step:
    """A training step of attn's loop."""
    model = ModelConfig(
        mechanism="mha",
        hidden_size=sizes.width,
        num_layers=sizes.layers,
        num_heads=sizes.heads,
        max_seq_len=sizes.context,
        positions="learned",
        norm="layer",
        feed_forward="gelu",
    )
    config = TrainingConfig(
        model=model,
        data=DataConfig(dataset="shakespeare"),
        optimizer=OptimizerConfig(steps=10**6, batch_size=sizes.batch, learning_rate=1e-3, warmup_steps=100),
        evaluation=EvaluationConfig(eval_steps=10**9, logging_steps=10**9),
        precision=precision,
    )
    trainer = Trainer(build_model(config, text), text, config)
    trainer.model.train()
    return lambda: trainer._one_step(NullReporter())  # noqa: SLF001 - without what `run` adds


def by_torch_alone(step: Step) -> Step:
    """The same step with torch's kernels instead of attn's."""

    def run() -> None:
        with mock.patch("attn_train.trainer.forward_precision", return_value=nullcontext()):
            step()

    return run


def nanogpt(folder: Path, sizes: Sizes, text: TextDataset, precision: str) -> Step:
    """A training step of nanoGPT's model."""
    module = runpy.run_path(str(folder / "model.py"))
    given = {"block_size": sizes.context, "vocab_size": text.tokenizer.vocab_size, "dropout": 0.0, "bias": False}
    shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
    model = module["GPT"](module["GPTConfig"](**given, **shape)).train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    tokens, length = text.training, sizes.context

    def run() -> None:
        places = torch.randint(len(tokens) - length, (sizes.batch,))
        inputs = torch.stack([tokens[i : i + length].long() for i in places])
        targets = torch.stack([tokens[i + 1 : i + 1 + length].long() for i in places])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(inputs, targets)[1]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


@contextmanager
def timed(into: list[float], steps: int) -> Iterator[None]:
    began = time.process_time()
    yield
    into.append((time.process_time() - began) / steps)


def shares(step: Step, steps: int) -> dict[str, float]:
    """The percentage of a step's time by part; the rest is Python, memory management and small operations."""
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        part = next((part for part, words in PARTS.items() if any(word in event.key for word in words)), "rest")
        spent[part] += event.self_cpu_time_total
    whole = sum(spent.values())
    return {part: round(100 * time / whole, 1) for part, time in spent.most_common()}


def compared(steps: dict[str, Step], turns: int, count: int) -> dict[str, dict[str, float]]:
    """The median milliseconds of each step, and its median speed-up over the peer's in the same turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(turns):
        for name, step in steps.items():
            with timed(seconds[name], count):
                for _ in range(count):
                    step()
    first = seconds["nanogpt"]
    found = {}
    for name, own in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(first, own, strict=True)]
        times = {"ms": round(1000 * statistics.median(own), 2)}
        found[name] = times | {
            "faster_by": round(statistics.median(ratios), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        }
    return found


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    known = RECIPES[args.recipe]
    sizes = Sizes(known.layers, known.width, known.context, args.batch or known.batch)
    text = tokenize(read_text([pull_shakespeare(home_folder())]), validation=0.1)
    said = {"benchmark": "train_kernels_cpu", "recipe": args.recipe, "batch": sizes.batch, "threads": 1}
    result = said | {"machine": machine(), "kernels": statement(), "torch": torch.__version__}
    for precision in args.precision:
        torch.manual_seed(1)
        mine = ours(sizes, text, precision)
        steps = {"nanogpt": nanogpt(args.nanogpt, sizes, text, precision), "attn": mine}
        if precision == "float32":
            steps["attn_by_torch_alone"] = by_torch_alone(ours(sizes, text, precision))
        found = {
            "share_of_step": {name: shares(step, args.profiled_steps) for name, step in steps.items()},
            "time": compared(steps, args.turns, args.turn_steps),
        }
        print(precision, json.dumps(found, indent=1), flush=True)
        result[precision] = found
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
