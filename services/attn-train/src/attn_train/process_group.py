"""The training loop's interface to the workers that share each batch, implemented here for a single worker."""

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
    """A single worker, and the base class of groups of several. The worker that `leads` reports and saves the model."""

    leads = True
    workers = 1
    rank = 0
    hosts: dist.ProcessGroup | None = None
    """The process group for what is on the hosts, such as sampled completions; None with a single worker."""
    writers: dist.ProcessGroup | None = None
    """The process group for writing checkpoints, in parallel to training; None with a single worker."""

    def set_up(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """Prepare the model for training, in place; returns the module that the optimizer updates: its parameters are
        this worker's part of the model's, under their names in the whole model."""
        set_up_blocks(model, config)
        return model

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this worker's part of a batch; all workers have drawn the same batch."""
        return batch

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context in which the losses of this worker's part of a batch are computed."""
        yield

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum of a number over all workers that have parts of the batch."""
        return value

    def summed_on_hosts(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor on the CPU over all workers. A collective: every worker must call it."""
        return value

    def finish_gradients(self) -> None:
        """Reduce the gradients to those of the whole batch, after all losses of an update were computed."""

    def clip(self, trained: list[nn.Parameter], limit: float) -> Tensor:
        """Clip the gradients to a total norm of at most `limit`; returns the norm before."""
        return nn.utils.clip_grad_norm_(trained, limit)

    def updated(self, step: int) -> None:
        """Called after each update; `step` is the number of updates before it."""

    def held(self, tensors: Tensors) -> dict[str, Held]:
        """Return this worker's tensors as parts of the whole model's tensors, without a copy."""
        return dict(tensors)

    def random_states(self, states: Tensors) -> dict[str, Tensor]:
        """Return the random states that this worker adds to a checkpoint."""
        return dict(states)

    def own_random_states(self, states: Tensors, seed: Callable[[str], int]) -> dict[str, Tensor]:
        """Return this worker's random states from those of a checkpoint, written by any number of workers.

        `seed` returns the seed for a use, such as `dropout_use()`.
        """
        del seed
        return dict(states)

    def dropout_use(self) -> str:
        """Return the name from which the seed of this worker's dropout is derived."""
        return "dropout"

    def agreed(self, asked: Stop | None) -> Stop | None:
        """Return how the leading worker was asked to stop, or None. A collective: every worker must call it."""
        return asked

    def agreed_step(self, step: int) -> int:
        """Return the step of the leading worker. A collective: every worker must call it."""
        return step

    def agreed_choice(self, *, chosen: bool) -> bool:
        """Return the choice of the leading worker. A collective: every worker must call it."""
        return chosen

    def lost_others(self, error: Exception) -> bool:
        """Whether an error means that another worker was lost, rather than that the job is wrong."""
        del error
        return False

    def whole_model(self, model: nn.Module, saved: Tensors, rebuild: Callable[[], Any] | None) -> nn.Module | None:
        """Return the model with all its weights on the leading worker, None on others; a collective.

        `saved` are the model's tensors that checkpoints contain. `rebuild` makes another model of the same kind, into
        which the weights are gathered if workers have only parts of them.
        """
        del saved, rebuild
        return model
