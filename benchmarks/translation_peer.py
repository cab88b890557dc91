"""How fast does the recipe `multi30k` train on a CPU, compared with JoeyNMT?

    python benchmarks/translation_peer.py --data FOLDER --joeynmt PYTHON

`FOLDER` has train.en, train.de, val.en and val.de; `PYTHON` is an interpreter with joeynmt and subword-nmt. Both train
a Transformer of the recipe's shape on batches of 64 pairs of the same text, with 4000 joint byte pairs each learned by
its own tool, in float32 and in bfloat16 (JoeyNMT's `fp16`, autocast). They take turns of some steps, JoeyNMT as a
process that stands still during the turns of others. Time is that of the processor, of one thread; ratios are medians
over adjacent turns.
"""

# ruff: noqa: SLF001
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from attn_cli.recipe import read_recipe
from attn_schema.home import home_folder
from attn_schema.training import TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.model import resolved
from attn_train.process_tuning import keep_freed_memory
from attn_train.records import NullReporter
from attn_train.trainer import Trainer
from attn_train.worker import build_model
from report import write_report

MERGES = 4000


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=Path, required=True)
    p.add_argument("--joeynmt", type=Path, required=True)
    p.add_argument("--turns", type=int, default=4)
    p.add_argument("--turn-steps", type=int, default=10)
    p.add_argument("--out", type=Path)
    return p.parse_args()


def config_of(recipe: TrainingConfig, args: argparse.Namespace, folder: Path, *, half: bool) -> dict[str, Any]:
    """JoeyNMT's configuration of the recipe's model and optimizer."""
    shape, given = recipe.model, recipe.optimizer
    data, fixed = args.data.absolute(), {"max_length": shape.max_seq_len, "lowercase": False, "normalize": False}
    tokens = {
        "level": "bpe", "voc_min_freq": 1, "voc_file": str(folder / "vocabulary.txt"), "tokenizer_type": "subword-nmt",
        "tokenizer_cfg": {"num_merges": MERGES, "codes": str(folder / "codes"), "pretokenizer": "none"},
    }  # fmt: skip
    names = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}
    special = {f"{name}_token": token for name, token in names.items()}
    special |= {f"{name}_id": place for place, name in enumerate(names)}
    side = {
        "type": "transformer", "num_layers": shape.num_layers, "num_heads": shape.num_heads,
        "hidden_size": shape.hidden_size, "ff_size": shape.intermediate_size, "dropout": shape.dropout,
        "layer_norm": "pre", "activation": "relu",
        "embeddings": {"embedding_dim": shape.hidden_size, "scale": True, "dropout": shape.dropout},
    }  # fmt: skip
    return {
        "name": "multi30k", "joeynmt_version": "2.3.0", "model_dir": str(folder / f"model-{half}"), "use_cuda": False,
        "fp16": half, "random_seed": 42,
        "data": {
            "train": str(data / "train"), "dev": str(data / "val"), "dataset_type": "plain",
            "src": {"lang": "en", **fixed, **tokens}, "trg": {"lang": "de", **fixed, **tokens},
            "special_symbols": special,
        },
        "testing": {"beam_size": 5, "batch_size": 64, "batch_type": "sentence", "eval_metrics": ["bleu"]},
        "training": {
            "optimizer": "adamw", "adam_betas": [0.9, given.beta2], "learning_rate": given.learning_rate,
            "scheduling": "warmupinversesquareroot", "learning_rate_warmup": given.warmup_steps, "weight_decay": 0.0,
            "loss": "crossentropy", "label_smoothing": given.label_smoothing, "normalization": "tokens",
            "batch_size": given.batch_size, "batch_type": "sentence", "early_stopping_metric": "bleu", "epochs": 100,
            "updates": 10**9, "validation_freq": 10**9, "logging_freq": args.turn_steps, "overwrite": True,
            "print_valid_sents": [], "keep_best_ckpts": 1,
        },
        "model": {
            "initializer": "xavier_uniform", "embed_initializer": "xavier_uniform", "tied_embeddings": True,
            "tied_softmax": True, "encoder": side, "decoder": side,
        },
    }  # fmt: skip


def learn_byte_pairs(args: argparse.Namespace, folder: Path) -> None:
    """Write subword-nmt's codes of both languages, and the vocabulary that they give."""
    tool = [str(args.joeynmt.parent / "subword-nmt")]
    text = b"".join((args.data / f"train.{language}").read_bytes() for language in ("en", "de"))
    codes = subprocess.run([*tool, "learn-bpe", "-s", str(MERGES)], input=text, stdout=subprocess.PIPE, check=True)
    (folder / "codes").write_bytes(codes.stdout)
    applied = subprocess.run(
        [*tool, "apply-bpe", "-c", str(folder / "codes")], input=text, stdout=subprocess.PIPE, check=True
    )
    tokens = sorted(set(applied.stdout.decode().split()))
    (folder / "vocabulary.txt").write_text("\n".join(["<unk>", "<pad>", "<s>", "</s>", *tokens]) + "\n")


class JoeyNMT:
    """A process of JoeyNMT's training, which runs in its turns alone."""

    def __init__(self, config: Path, python: Path) -> None:
        command = [str(python), "-m", "joeynmt", "train", str(config), "--skip-test"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._steps()

    def _steps(self) -> None:
        """Wait until it logs, and stop it."""
        for line in self._process.stdout or ():
            if "Step:" in line:
                os.kill(self._process.pid, signal.SIGSTOP)
                return
        raise SystemExit(f"JoeyNMT ended with {self._process.wait()}")

    def _seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def turn(self) -> float:
        """Train until it logs again; returns the processor seconds taken."""
        began = self._seconds()
        os.kill(self._process.pid, signal.SIGCONT)
        self._steps()
        return self._seconds() - began

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()


def our_turns(recipe: TrainingConfig, precision: str, steps: int) -> Callable[[], float]:
    """The turns of attn's loop."""
    config = resolved(recipe.replace(precision=precision))
    dataset = load_dataset(config, home_folder(), lambda _: None)
    trainer = Trainer(build_model(config, dataset), dataset, config)

    def turn() -> float:
        began = process_time()
        for _ in range(steps):
            trainer._one_step(NullReporter())
        return process_time() - began

    return turn


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    recipe = read_recipe("multi30k")
    recipe = recipe.replace(data=recipe.data.replace(dataset=str(args.data.absolute())))
    sides = {f"attn {name}": our_turns(recipe, name, args.turn_steps) for name in ("float32", "bfloat16")}
    with tempfile.TemporaryDirectory() as place:
        folder, peers = Path(place), []
        learn_byte_pairs(args, folder)
        for name, half in (("float32", False), ("bfloat16", True)):
            config = folder / f"{name}.yaml"
            config.write_text(json.dumps(config_of(recipe, args, folder, half=half)))
            peers.append(JoeyNMT(config, args.joeynmt))
            sides[f"joeynmt {name}"] = peers[-1].turn
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.turns + 1):
            for name, side in sides.items():
                taken = side()
                if turn:
                    seconds[name].append(taken)
        for peer in peers:
            peer.end()
    rows = []
    for name, each in seconds.items():
        rates = [args.turn_steps * recipe.optimizer.batch_size / taken for taken in each]
        ratios = [theirs / ours for ours, theirs in zip(seconds["attn float32"], each, strict=True)]
        facts = {"pairs_per_second": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
        facts["attn_float32_is_faster_by"] = statistics.median(ratios)
        rows.append({"side": name, **{key: round(value, 2) for key, value in facts.items()}})
    write_report("translation-peer-cpu", {"batch": recipe.optimizer.batch_size, "threads": 1}, rows, args.out)


if __name__ == "__main__":
    main()
