"""The workers that share each batch, as the training loop sees them; here, one that has it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from attn_schema.training import TrainingConfig
from torch import Tensor, nn

from attn_train.precision import set_up_blocks
from attn_train.records import Stop
from attn_train.sharded_checkpoint import Held

Tensors = Mapping[str, Tensor]
"""Tensors by the name of their parameter or buffer; moments of the optimizer as "moment:parameter"."""


class Group:
    """A worker without others. `leads` says whether it reports and writes checkpoints."""

    leads = True
    workers = 1
    writers: dist.ProcessGroup | None = None
    """Those who write checkpoints together, beside what else they do; None: this one is alone."""

    def set_up(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Prepare the model, in place, for its updates; returns what the optimizer updates: a module whose parameters
        are those of the model that this worker keeps, under the names that they have in the whole model."""
        set_up_blocks(model, config)
        return model

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This worker's part of a batch that all workers have drawn."""
        return batch

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within it, losses of this worker's part of a batch are computed."""
        yield

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a number over all workers with parts of the batch."""
        return value

    def finish_gradients(self) -> None:
        """Make the gradients those of the whole batch, once all losses of an update were computed."""

    def clip(self, trained: list[nn.Parameter], limit: float) -> Tensor:
        """The norm of all gradients, which are scaled to at most `limit`."""
        return nn.utils.clip_grad_norm_(trained, limit)

    def updated(self, step: int) -> None:
        """To be called after each update; `step` were done before."""

    def held(self, tensors: Tensors) -> dict[str, Held]:
        """Which elements of the tensors of the whole model this worker's are, in the same memory."""
        return dict(tensors)

    def random_states(self, states: Tensors) -> dict[str, Tensor]:
        """What this worker adds to a checkpoint of the random numbers of all workers."""
        return dict(states)

    def own_random_states(self, states: Tensors, seed: Callable[[str], int]) -> dict[str, Tensor]:
        """This worker's states, from those of a checkpoint, which may be of another number of workers.

        `seed` gives that of a use.
        """
        del seed
        return dict(states)

    def dropout_use(self) -> str:
        """For what the seed of this worker's dropout is derived."""
        return "dropout"

    def agreed(self, asked: Stop | None) -> Stop | None:
        """How to stop, where the leading worker was asked to; every worker is to call it."""
        return asked

    def agreed_step(self, step: int) -> int:
        """The step that the leading worker gives; every worker is to call it."""
        return step

    def agreed_choice(self, *, chosen: bool) -> bool:
        """What the leading worker chose; every worker is to call it."""
        return chosen

    def lost_others(self, error: Exception) -> bool:
        """Whether an error says that another worker is gone, and nothing about the job."""
        del error
        return False

    def whole_model(self, model: nn.Module, saved: Tensors, rebuild: Callable[[], Any] | None) -> nn.Module | None:
        """The model with all its weights, of which `saved` are those that checkpoints keep, on the leading worker.

        `rebuild` makes another of its kind, where workers have parts. None on other workers; each is to call it.
        """
        del saved, rebuild
        return model
