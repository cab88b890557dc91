"""The plan of a comparison: one run per mechanism, size, dataset and seed, with the steps that the budget allows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from attn_core import Capability, installed
from attn_core.errors import InvalidValue, UserError
from attn_core.options import parse_options
from attn_schema.model import DECODER, ModelConfig
from attn_schema.training import DataConfig, TrainingConfig

from attn_train.admission import check_config
from attn_train.comparison.budget import Budget
from attn_train.data.load import load_dataset
from attn_train.data.synthetic import TASKS
from attn_train.model import resolved
from attn_train.pricing import StepPrice, seconds_of_a_step, step_price
from attn_train.tasks.base import Dataset

FIELDS = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "positions")
"""Fields of the model config that may be given together with a mechanism, like its options."""
ID_LENGTH = 64
POINTS = 10
"""The number of evaluations during a run."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True)
class Entry:
    """A mechanism to compare: its name, its options, and the fields of the model config that apply to it alone."""

    mechanism: str
    options: tuple[tuple[str, Any], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        """The entry as text, such as `sliding_window:window=16`."""
        return ":".join([self.mechanism, *(f"{name}={value}" for name, value in (*self.fields, *self.options))])

    @classmethod
    def parse(cls, text: str) -> Entry:
        """Parse a text such as "sliding_window:window=16".

        Raises `UnknownName`, with similar names, and `InvalidValue` for a mechanism that cannot be causal.
        """
        name, *given = text.strip().split(":")
        mechanism = installed().mechanisms.get(name)
        if not mechanism.can(Capability.CAUSAL):
            able = sorted(found.name for found in installed().mechanisms if found.can(Capability.CAUSAL))
            raise InvalidValue.of("--train", name, f"a mechanism that can be causal: {', '.join(able)}")
        values = parse_options(given, "--train")
        options = tuple((key, value) for key, value in values.items() if key not in FIELDS)
        return cls(name, options, tuple((key, value) for key, value in values.items() if key in FIELDS))


def parse_entries(text: str) -> list[Entry]:
    """Parse a list such as "mha,gqa:num_kv_heads=2"; raises `InvalidValue` if it is empty or has duplicates."""
    entries = [Entry.parse(part) for part in text.split(",") if part.strip()]
    if not entries:
        raise InvalidValue.of("--train", text, "mechanisms, separated by commas, such as mha,gqa,mla")
    for place, entry in enumerate(entries):
        if entry in entries[:place]:
            raise InvalidValue.of("--train", entry.label, "each mechanism once")
    return entries


def parse_sizes(text: str) -> list[dict[str, int]]:
    """Parse sizes such as "32x2,64x2,128x4", hidden_size x num_layers, into model fields; "" gives one empty dict.

    Raises `InvalidValue` for other texts, and for fewer than three sizes.
    """
    if not text:
        return [{}]
    pairs = [part.strip().split("x") for part in text.split(",")]
    if len({tuple(pair) for pair in pairs}) < 3 or any(
        len(pair) != 2 or not all(number.isascii() and number.isdecimal() and int(number) for number in pair)
        for pair in pairs
    ):
        raise InvalidValue.of("--sizes", text, "at least three of HIDDEN_SIZExNUM_LAYERS, such as 32x2,64x2,128x4")
    return [{"hidden_size": int(width), "num_layers": int(layers)} for width, layers in pairs]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a comparison: its job id, mechanism, size, dataset and seed, its config, and the cost of a step."""

    id: str
    label: str
    size: str
    dataset: str
    seed: int
    config: TrainingConfig
    price: StepPrice

    @property
    def flops(self) -> float:
        """The FLOPs of all steps."""
        return self.config.optimizer.steps * self.price.flops

    def facts(self) -> dict[str, Any]:
        """Return the run as JSON values, without its configuration."""
        kept = {name: getattr(self, name) for name in ("id", "label", "size", "dataset", "seed", "flops")}
        return kept | {"steps": self.config.optimizer.steps, "price": asdict(self.price)}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is compared: `entries` at `sizes`, with `seeds` seeds, on the dataset of `config` and on `probes`."""

    config: TrainingConfig
    entries: Sequence[Entry]
    budget: Budget
    seeds: int = 3
    probes: Sequence[str] = ()
    sizes: Sequence[dict[str, int]] = ({},)
    name: str = ""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InvalidValue.of("--seeds", self.seeds, "a whole number from 1")
        if unknown := [probe for probe in self.probes if probe not in TASKS]:
            raise InvalidValue.of("--probes", unknown[0], ", ".join(TASKS))
        if self.name and not NAME.fullmatch(self.name):
            raise InvalidValue.of("--name", self.name, "1 to 32 letters, digits, '-' and '_'")
        model = self.config.model
        for field in ("mechanism", "options"):
            if getattr(model, field):
                raise InvalidValue.of(field, getattr(model, field), "none: give it in --train, as NAME:OPTION=1")
        if model.family != DECODER:
            raise InvalidValue.of("family", model.family, f"{DECODER}, the only family that can be compared")
        if model.base_model is not None:
            raise InvalidValue.of("base_model", model.base_model, "none: every run trains from initial weights")

    @property
    def title(self) -> str:
        """The given name, or one derived from all options, so that the same command resumes the same comparison."""
        if self.name:
            return self.name
        identity = [self.config, [entry.label for entry in self.entries], str(self.budget), self.seeds, self.probes]
        text = msgspec.json.encode([*identity, self.sizes], order="deterministic", enc_hook=str)
        return f"compare-{hashlib.sha256(text).hexdigest()[:8]}"

    def datasets(self) -> list[str]:
        """Return the dataset of the config, followed by the probes."""
        return list(dict.fromkeys([self.config.data.dataset, *self.probes]))


def planned(question: Question, home: Path, say: Callable[[str], None]) -> list[Run]:
    """Return all runs, validated as jobs are at submission.

    Seeds are the outermost loop, so that an unfinished comparison covers all mechanisms. Raises the first error that is
    found, such as `InvalidValue` for a budget smaller than one step, with the cost of a step.
    """
    kinds: list[tuple[Entry, dict[str, int], str, TrainingConfig, StepPrice]] = []
    for dataset in question.datasets():
        loaded: Dataset | None = None
        for entry in question.entries:
            for size in question.sizes:
                config = _config(question, entry, size, dataset)
                check_config(config, home=home)
                loaded = load_dataset(config, home, say) if loaded is None else loaded
                price = step_price(config, loaded)
                kinds.append((entry, size, dataset, with_steps(config, question.budget, price, loaded), price))
    return [
        _run(question, kind, seed)
        for seed in range(question.config.seed, question.config.seed + question.seeds)
        for kind in kinds
    ]


def _run(question: Question, kind: tuple[Entry, dict[str, int], str, TrainingConfig, StepPrice], seed: int) -> Run:
    entry, size, dataset, config, price = kind
    sized = "x".join(str(number) for number in size.values())
    words = [question.title, Path(dataset).stem, entry.label, *([sized] if sized else [])]
    return Run(
        id=run_name(words, seed),
        label=entry.label,
        size=sized,
        dataset=dataset,
        seed=seed,
        config=config.replace(seed=seed),
        price=price,
    )


def run_name(words: Sequence[str], seed: int) -> str:
    """Return the id of a job, made from `words`, which identify it, and its seed; at most `ID_LENGTH` characters."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", "-".join(words))
    end = f"-s{seed}"
    if len(name) + len(end) > ID_LENGTH:
        digest = hashlib.sha256("-".join(words).encode()).hexdigest()[:8]
        name = f"{name[: ID_LENGTH - len(end) - 9]}-{digest}"
    return name + end


def _config(question: Question, entry: Entry, size: dict[str, int], dataset: str) -> TrainingConfig:
    """Return the configuration of one kind of run.

    `num_kv_heads` of the base configuration applies only to mechanisms with grouped key/value heads.
    """
    base = question.config
    fields = {"mechanism": entry.mechanism, "options": dict(entry.options), **size, **dict(entry.fields)}
    mechanism = installed().mechanisms.get(entry.mechanism)
    if not mechanism.can(Capability.GROUPED) and "num_kv_heads" not in fields:
        fields["num_kv_heads"] = None
    model: ModelConfig = ModelConfig.from_mapping({**_plain(base.model), **fields})
    data = base.data.replace(dataset=dataset)
    if dataset in question.probes:
        data = data.replace(tokenizer="character", prepared=DataConfig().prepared)
    elif dataset not in TASKS:
        data = data.replace(max_pairs=0)
    try:
        return resolved(base.replace(model=model, data=data))
    except UserError as error:
        raise type(error)(f"{entry.label}: {error.message}", **error.metadata) from error


def _plain(model: ModelConfig) -> dict[str, Any]:
    return {name: value for name in model.__struct_fields__ if (value := getattr(model, name)) is not None}


def with_steps(config: TrainingConfig, budget: Budget, price: StepPrice, dataset: Dataset) -> TrainingConfig:
    """Return the configuration with the steps that the budget allows; warm-up and evaluations are adapted to them."""
    seconds = seconds_of_a_step(config, dataset) if budget.unit == "minutes" else 0.0
    one = {"flops": price.flops, "tokens": price.tokens, "minutes": seconds / 60}[budget.unit]
    steps = budget.steps(flops=price.flops, tokens=price.tokens, seconds=seconds)
    if steps < 1:
        allowed = f"at least {budget.unit}={one:.4g}, one step of {config.model.label} on {config.data.dataset}"
        raise InvalidValue.of("--budget", str(budget), allowed)
    optimizer = config.optimizer.replace(steps=steps, warmup_steps=min(config.optimizer.warmup_steps, steps // 2))
    every = max(1, min(config.evaluation.eval_steps, steps // POINTS))
    evaluation = config.evaluation.replace(eval_steps=every, logging_steps=every)
    return config.replace(optimizer=optimizer, evaluation=evaluation)
