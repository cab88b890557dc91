"""GRPO: a model learns from the rewards of its own completions (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_models.tokenizers import Tokenizer
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.data.conversations import rows_in
from attn_train.data.prompts import Prompt, read_prompts
from attn_train.data.reading import Reading
from attn_train.data.token_shards.inputs import input_files, split_files, unread
from attn_train.precision import forward_precision
from attn_train.rewards import Rewards, Scored
from attn_train.tasks import on_policy
from attn_train.tasks.base import (
    PADDED,
    OnBatch,
    TokenDataset,
    count_targets,
    fitting,
    split_validation,
    to_device,
    validation_sample,
)
from attn_train.tasks.on_policy import Completion, OnPolicyTask, Sampler, logprobs_at, require_room, token_logprobs
from attn_train.tasks.policy_losses import advantages_of, grpo_loss

EQUAL = 1e-8
"""The maximum standard deviation of rewards that count as equal, as in TRL."""


@dataclass(frozen=True, eq=False)
class PromptDataset(TokenDataset):
    """Training and validation prompts, and in `notes` what was left out.

    `reference` is the model to whose distribution the policy is kept close, if it is not the model without its adapter;
    `sampler` samples the completions.
    """

    training: Sequence[Prompt]
    validation: Sequence[Prompt]
    tokenizer: Tokenizer
    rewards: Rewards
    notes: str = ""
    reference: Any = None
    sampler: Sampler = Sampler()  # noqa: RUF009 -- it has no state

    @property
    def summary(self) -> str:
        """The number of prompts, and the rewards."""
        named = ", ".join(function.name for function in self.rewards.functions)
        counts = f"{len(self.training)} training and {len(self.validation)} validation prompts"
        return f"{counts}{self.notes}, rewarded by {named}"

    def task(self, config: TrainingConfig) -> GrpoTask:
        """Return the training task."""
        return GrpoTask(self, config)


def prompt_dataset(config: TrainingConfig, tokenizer: Tokenizer) -> PromptDataset:
    """Load the prompts of a file or folder; those that leave no room for a completion are not trained on.

    Raises as `read_prompts` and `require_room` do, and `InvalidValue` if no training prompt is left.
    """
    require_room(config)
    rewards, reading = Rewards(config.on_policy), Reading(skip_broken=config.data.skip_broken)
    path = Path(config.data.path or "")
    splits = split_files(path, input_files([str(path)]))
    aside = unread(path, splits["train"] + splits["validation"])
    training, kept = (
        list(read_prompts(rows_in(splits[name], reading), config.data.columns, tokenizer, rewards.needs, reading))
        for name in ("train", "validation")
    )
    if not splits["validation"]:
        training, kept = map(list, split_validation(training, config.data.validation_fraction))
    room = config.model.sequence_length - config.on_policy.max_completion_length
    limit = "max_seq_len - max_completion_length"
    short, longer = fitting(training, lambda prompt: len(prompt.ids), room, f"prompts{reading}", limit)
    kept = [prompt for prompt in kept if len(prompt.ids) <= room]
    return PromptDataset(short, kept, tokenizer, rewards, f"{longer}{reading}{aside}")


class GrpoTask(OnPolicyTask):
    """Batches of completions of the same number of prompts each: inputs [batch, longest], the log probabilities of
    their targets under the policy that sampled and, with `beta`, under the reference, advantages [batch], targets."""

    def __init__(self, prompts: PromptDataset, config: TrainingConfig) -> None:
        count = config.optimizer.batch_size // config.on_policy.num_generations
        # Of no length: batches of only short prompts, or only long ones, would pull the policy to and fro.
        super().__init__(config, [0] * len(prompts.training), prompts.tokenizer, count)
        self._data, self._sampler = prompts, prompts.sampler

    def weight(self, batch: tuple[Tensor, ...]) -> int:
        """Return the number of elements that the loss averages: tokens for dapo, else completions."""
        return count_targets(batch) if self._config.on_policy.loss_type == "dapo" else len(batch[0])

    def loss(self, model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the `grpo_loss` of a batch."""
        inputs, old, *reference, advantages, targets = batch
        kept = targets != PADDED
        trained = token_logprobs(model, inputs, targets, self._config.on_policy.temperature)
        known = [logprobs[kept] for logprobs in (old, *reference)]
        rows = kept.nonzero()[:, 0]
        logprobs = trained, known[0], known[1] if reference else None
        loss, measured = grpo_loss(logprobs, advantages, rows, self._config.on_policy)
        if torch.is_grad_enabled():
            tokens = max(1, len(rows))
            if not self._sampler.differs(self._config):
                measured |= {"sampling_logp_difference": (trained.detach() - known[0]).abs().sum() / tokens}
            self._measure(tokens, **measured)
        return loss

    def validation_loss(self, model: nn.Module, batches: int, on_batch: OnBatch) -> float | None:  # noqa: ARG002 -- rewards are measured
        """Return None: the reward of validation prompts is measured in place of a loss."""
        return None

    def validation_metrics(self, model: nn.Module, batches: int, on_batch: OnBatch) -> dict[str, float]:
        """Return the mean reward of one completion of each prompt of at most `batches` validation batches, sampled with
        the same random numbers in every call."""
        chosen = validation_sample(self._data.validation, batches)
        if not chosen:
            return {}
        prompts = {-1 - place: prompt.ids for place, prompt in enumerate(chosen)}
        found = self._sampler(model, self._tokenizer, prompts, self._config, 1, on_batch)
        rewards, _ = self._data.rewards(_scored(chosen, found))
        return {"validation_reward": sum(rewards) / len(rewards)}

    def final_metrics(self, model: nn.Module, on_batch: OnBatch) -> Mapping[str, float]:  # noqa: ARG002 -- the reward says all
        """Return no metrics, as the reward is sufficient."""
        return {}

    def _new_batch(self, model: Any, on_batch: OnBatch) -> tuple[Tensor, ...]:
        settings = self._config.on_policy
        drawn = [self._data.training[place] for place in self._epochs.next_batch()]
        found = self._sampled(model, [prompt.ids for prompt in drawn], settings.num_generations, on_batch)
        prompts = [prompt for prompt in drawn for _ in range(settings.num_generations)]
        rewards, means = self._data.rewards(_scored(prompts, found))
        given = torch.tensor(rewards)
        spread = given.view(len(drawn), -1).std(1)
        equal = spread <= EQUAL
        self._measure(reward=given.mean(), reward_std=spread.mean(), frac_reward_zero_std=equal.float().mean())
        if len(means) > 1:
            self._measure(**{f"reward_{name}": value for name, value in means.items()})
        inputs, targets = on_policy.rows_of([prompt.ids for prompt in prompts], [one.ids for one in found])
        old = torch.zeros(targets.shape)
        old[targets != PADDED] = torch.tensor([value for one in found for value in one.logprobs])
        if self._sampler.differs(self._config):
            old = self._instead(model, inputs, targets, old)
        if settings.mask_truncated_completions:
            targets[torch.tensor([one.truncated for one in found])] = PADDED
        reference = self._reference(model, inputs, targets) if settings.beta else []
        return inputs, old, *reference, advantages_of(given, settings), targets

    def _instead(self, model: Any, inputs: Tensor, targets: Tensor, served: Tensor) -> Tensor:
        """Return the log probabilities [batch, longest] of the targets under the policy at the temperature; measures
        how far those that a server gave are from them at temperature 1."""
        temperatures = dict.fromkeys((self._config.on_policy.temperature, 1.0))
        *tempered, plain = self._logprobs(model, inputs, targets, *temperatures)
        tokens = count_targets((targets,))
        self._measure(tokens, sampling_logp_difference=(plain - served).abs().sum() / max(1, tokens))
        return tempered[0] if tempered else plain

    def _reference(self, model: Any, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        """Return the log probabilities [batch, longest] of the targets under the reference, in a list."""
        adapted: Any = getattr(model, "adapted", None)
        own = self._data.reference
        with nullcontext() if own is not None else adapted.without():
            return self._logprobs(model if own is None else own, inputs, targets, self._config.on_policy.temperature)

    def _logprobs(self, model: Any, inputs: Tensor, targets: Tensor, *temperatures: float) -> list[Tensor]:
        """Return the log probabilities [batch, longest] of the targets under a model at each temperature, 0
        elsewhere."""
        device = next(model.parameters()).device
        ids, goals = to_device((inputs, targets), device)
        numerics = forward_precision(
            self._config.precision, device, batch_invariant=self._config.on_policy.batch_invariant
        )
        with torch.no_grad(), numerics:
            found = logprobs_at(model, ids, goals, temperatures)
        every = [torch.zeros(targets.shape) for _ in temperatures]
        for whole, logprobs in zip(every, found, strict=True):
            whole[targets != PADDED] = logprobs.float().cpu()
        return every


def _scored(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Scored:
    """What rewards are asked about: a completion of each prompt."""
    return Scored(
        prompts=[prompt.given for prompt in prompts],
        places=[prompt.place for prompt in prompts],
        columns=[prompt.columns for prompt in prompts],
        completions=[one.text for one in completions],
        completion_ids=[tuple(one.ids) for one in completions],
    )
