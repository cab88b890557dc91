"""Completions that a model samples for its own training, by an engine in the same process with the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from attn_core.errors import InternalError, InvalidValue
from attn_engine import EngineConfig, FinishReason, Request, SamplingParams, build_engine
from attn_models.losses import at_least_float32
from attn_models.tokenizers import Tokenizer
from attn_schema import OutputDelta
from attn_schema.training import TrainingConfig
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from attn_train.precision import forward_precision
from attn_train.tasks.base import PADDED, ExampleTask, OnBatch, count_targets, derived

BLOCK = 64
"""More tokens than a block of the KV cache, of which the last of a sequence is seldom full."""


@dataclass
class Completion:
    """A sampled completion: its tokens, with the end token, their log probabilities in nats, its text, and whether it
    was cut off."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    truncated: bool = False

    def take(self, delta: OutputDelta) -> None:
        """Append what was sampled next."""
        self.ids += [token.id for token in delta.tokens]
        self.logprobs += [float(token.logprob or 0.0) for token in delta.tokens]
        self.text += delta.text
        self.truncated = self.truncated or delta.finish_reason is FinishReason.LENGTH


class Tempered:
    """A model whose logits are divided by a temperature, so that the log probabilities of what is sampled from it are
    those of the distribution that it was sampled from."""

    def __init__(self, model: Any, temperature: float) -> None:
        self._model, self._temperature = model, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab_size] of hidden states."""
        logits: Tensor = self._model.logits(hidden)
        return logits / self._temperature


def sampled(
    model: Any,
    tokenizer: Tokenizer,
    prompts: Mapping[int, Sequence[int]],
    config: TrainingConfig,
    count: int,
    on_batch: OnBatch,
) -> list[Completion]:
    """Sample `count` completions of each prompt, in their order; prompts are token ids, by the numbers from which their
    random numbers derive.

    The model is neither copied nor changed. All prompts are batched continuously, and the completions of a prompt share
    its keys and values. Raises the errors of requests.
    """
    device, on_policy = next(model.parameters()).device, config.on_policy
    training = model.training
    model.eval()
    longest = [on_policy.max_completion_length + len(ids) + BLOCK for ids in prompts.values()]
    tempered: Any = Tempered(model, on_policy.temperature)
    settings = EngineConfig(
        enforce_eager=True, max_queued_requests=len(prompts), batch_invariant=on_policy.batch_invariant
    ).with_defaults(device.type)
    room = min(count * sum(longest), settings.batch_sizes[0] * max(longest))
    engine = build_engine(tempered, tokenizer, settings, kv_cache_tokens=room)
    for number, ids in prompts.items():
        engine.submit(Request(id=str(number), token_ids=tuple(ids), params=sampling_params(config, number, count)))
    found = {str(number): [Completion() for _ in range(count)] for number in prompts}
    try:
        with forward_precision(config.precision, device, batch_invariant=on_policy.batch_invariant):
            while not engine.idle:
                for event in engine.step():
                    if event.error is not None:
                        raise event.error
                    found[event.request_id][event.delta.index].take(event.delta)
                on_batch()
    finally:
        model.train(training)
    return [one for group in found.values() for one in group]


class Sampler:
    """Samples for the only worker of a job, from the model that it trains; base class of what samples for several."""

    def __call__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        prompts: Mapping[int, Sequence[int]],
        config: TrainingConfig,
        count: int,
        on_batch: OnBatch,
    ) -> list[Completion]:
        """Sample `count` completions of each prompt; see `sampled`."""
        return sampled(model, tokenizer, prompts, config, count, on_batch)

    def differs(self, config: TrainingConfig) -> bool:  # noqa: ARG002 -- the model that is trained samples
        """Whether log probabilities of completions are not those of the policy that is trained, which computes them."""
        return False

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over the workers."""
        return value


def sampling_params(config: TrainingConfig, number: int, count: int) -> SamplingParams:
    """Return how `count` completions of the prompt of this number are sampled, at temperature 1."""
    return SamplingParams(
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        seed=derived(config.seed, f"completions {number}"),
        n=count,
        max_new_tokens=config.on_policy.max_completion_length,
        top_logprobs=0,
    )


def require_room(config: TrainingConfig) -> None:
    """Raise `InvalidValue` if completions of the maximum length leave no room for a prompt."""
    length, longest = config.model.sequence_length, config.on_policy.max_completion_length
    if longest >= length:
        allowed = f"less than {length}, the tokens of prompt and completion together (max_seq_len)"
        raise InvalidValue.of("config.on_policy.max_completion_length", longest, allowed)


def rows_of(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [rows, longest], int64: prompts and completions of which the latter are targets."""
    whole = [torch.tensor([*prompt, *completion]) for prompt, completion in zip(prompts, completions, strict=True)]
    targets = [row[1:].clone() for row in whole]
    for target, prompt in zip(targets, prompts, strict=True):
        target[: len(prompt) - 1] = PADDED
    inputs = pad_sequence([row[:-1] for row in whole], batch_first=True)
    return inputs, pad_sequence(targets, batch_first=True, padding_value=PADDED)


def logits_at(model: Any, inputs: Tensor, kept: Tensor) -> Tensor:
    """Return the logits [tokens, vocab_size], at least float32, at the places `kept` of inputs, [rows, longest]."""
    own = hasattr(model, "hidden_at")
    return at_least_float32(model.logits(model.hidden_at(inputs, kept)) if own else model(inputs)[kept])


def token_logprobs(model: Any, inputs: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log probabilities [tokens] of the targets of rows, end to end, at a temperature, in nats."""
    return logprobs_at(model, inputs, targets, [temperature])[0]


def logprobs_at(model: Any, inputs: Tensor, targets: Tensor, temperatures: Sequence[float]) -> list[Tensor]:
    """Return the result of `token_logprobs` at each of the temperatures, from one forward pass."""
    if list(temperatures) == [1] and hasattr(model, "losses_at"):
        return [-cast("Tensor", model.losses_at(inputs, targets, PADDED))]
    kept = targets != PADDED
    logits, ids = logits_at(model, inputs, kept), targets[kept]
    return [-functional.cross_entropy(logits / each, ids, reduction="none") for each in temperatures]


class OnPolicyTask(ExampleTask):
    """Base class of tasks whose batches the model samples, from `prompts` prompts each.

    `sampled_batch` returns each batch in `num_iterations` steps, of as many batches as a step accumulates, before new
    ones are sampled.
    """

    cross_entropy = False

    def __init__(self, config: TrainingConfig, lengths: Sequence[int], tokenizer: Tokenizer, prompts: int) -> None:
        super().__init__(config, lengths, prompts)
        self._config, self._tokenizer = config, tokenizer
        self._sampler = Sampler()
        self._calls = 0
        self._kept: list[tuple[Tensor, ...]] = []
        self._measured: dict[str, Tensor] = {}

    @property
    def most_targets(self) -> int:
        """The targets of a batch if no completion ends by itself."""
        return self._batch * self._config.on_policy.max_completion_length

    def next_batch(self) -> tuple[Tensor, ...]:
        """Raises `InternalError`, as batches depend on the model."""
        raise InternalError("a model samples the batches of this task")

    def sampled_batch(self, model: Any, on_batch: OnBatch) -> tuple[Tensor, ...]:
        """Return the next batch; `on_batch` is called while the model samples."""
        together = self._config.optimizer.gradient_accumulation_steps
        place = self._calls % (together * self._config.on_policy.num_iterations)
        self._calls += 1
        if place == 0:
            self._kept = []
        if place < together:
            self._kept.append(self._new_batch(model, on_batch))
        batch = self._kept[place % together]
        self.tokens += count_targets(batch)
        return batch

    def _new_batch(self, model: Any, on_batch: OnBatch) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _sampled(self, model: Any, prompts: Sequence[Sequence[int]], count: int, on_batch: OnBatch) -> list[Completion]:
        """Return `count` completions of each of the prompts that were just drawn."""
        numbers = range(self._epochs.drawn - len(prompts), self._epochs.drawn)
        by_number = dict(zip(numbers, prompts, strict=True))
        found = self._sampler(model, self._tokenizer, by_number, self._config, count, on_batch)
        self._measure(completion_length=sum(len(one.ids) for one in found) / len(found))
        self._measure(truncated_share=sum(one.truncated for one in found) / len(found))
        return found

    def _measure(self, weight: float = 1.0, **values: Tensor | float) -> None:
        """Add values, with a weight, to the means over all workers that `take_metrics` returns."""
        for name, value in values.items():
            now = torch.tensor([float(value) * weight, weight], dtype=torch.float64)
            self._measured[name] = self._measured.get(name, 0) + now

    def take_metrics(self) -> dict[str, float]:
        """Return the means of what was measured since the last call, by name."""
        names, self._measured = sorted(self._measured.items()), {}
        sums = self._sampler.summed(torch.stack([pair for _, pair in names])) if names else torch.zeros(0, 2)
        return {name: (total / weight).item() for (name, _), (total, weight) in zip(names, sums, strict=True)}

    def position(self) -> dict[str, Tensor]:
        """Return the position for a checkpoint, with the batches that further steps use."""
        cycle = self._config.optimizer.gradient_accumulation_steps * self._config.on_policy.num_iterations
        kept = self._kept if self._calls % cycle else []
        parts = {f"kept.{n}.{m}": part for n, batch in enumerate(kept) for m, part in enumerate(batch)}
        measured = {f"measured.{name}": value for name, value in self._measured.items()}
        return super().position() | {"calls": torch.tensor([self._calls])} | parts | measured

    def restore_position(self, position: Mapping[str, Tensor]) -> None:
        """Continue from a position."""
        super().restore_position(position)
        self._calls = int(position["calls"][0])
        batches: dict[int, dict[int, Tensor]] = {}
        for name, part in position.items():
            kind, _, rest = name.partition(".")
            if kind == "measured":
                self._measured[rest] = part
            elif kind == "kept":
                batch, _, place = rest.partition(".")
                batches.setdefault(int(batch), {})[int(place)] = part
        self._kept = [tuple(parts[m] for m in sorted(parts)) for _, parts in sorted(batches.items())]
