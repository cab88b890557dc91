"""Measures the memory, time and FLOPs of one worker's part of a training step by running it with few sequences."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attn_core.splitting import Rank
from attn_models.tensor_parallel import Collectives, split_model
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from attn_train.layout import MeshLayout
from attn_train.precision import set_up_blocks
from attn_train.process_group import Group
from attn_train.records import NullReporter, Stop, StopFlag
from attn_train.tasks.base import Dataset
from attn_train.trainer import Trainer

ENDLESS = 2**31 - 1


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of live tensors created by operations and kernels within it, and their peak."""

    sees_kernels = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Count these tensors, each storage once."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata  # noqa: SLF001 -- what tells storages apart
            if key not in self._known:
                size = storage.nbytes()
                self._known[key] = weakref.ref(storage, self._freed(key, size))
                self.now += size
                self.peak = max(self.peak, self.now)

    def _freed(self, key: int, size: int) -> Callable[[Any], None]:
        def freed(_: Any) -> None:
            self.now -= size
            del self._known[key]

        return freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count its results."""
        made = func(*args, **(kwargs or {}))
        self.add([leaf for leaf in tree_leaves(made) if type(leaf) is Tensor or isinstance(leaf, nn.Parameter)])
        return made


def _same(rows: Tensor) -> Tensor:
    return rows


class FirstWorker(Group):
    """The first worker of a layout, without the others: it has its heads, tokens and at most `rows` of its sequences.

    There is no communication, so values are wrong, but sizes are right.
    """

    def __init__(self, layout: MeshLayout) -> None:
        self.rows = ENDLESS
        self._layout = layout

    def set_up(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """See `Group.set_up`; heads are split, but blocks are not sharded."""
        if self._layout.tp > 1:
            split_model(model, Rank(0, self._layout.tp), Collectives(_same, _same))
        set_up_blocks(model, config)
        return model

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the first sequences of a batch, and with context parallelism the first of their tokens."""
        if self._layout.workers == 1 and self.rows >= len(batch[0]):
            return batch
        rows = min(self.rows, len(batch[0]) // self._layout.dp)
        mine = tuple(part[:rows] for part in batch)
        return mine if self._layout.cp == 1 else tuple(part[:, : part.shape[1] // self._layout.cp] for part in mine)


class _Steps(NullReporter):
    """A reporter that stops a run after `steps` steps, and records the seconds of each."""

    def __init__(self, steps: int, elapsed: float) -> None:
        self.flag = StopFlag()
        self.seconds: list[float] = []
        self._steps, self._before = steps, elapsed

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record a step."""
        del step
        self.seconds.append(values["elapsed_seconds"] - self._before)
        self._before = values["elapsed_seconds"]
        if len(self.seconds) >= self._steps:
            self.flag.set(Stop.DISCARD)


class StepProbe:
    """Trains a model on one worker's part of the batches of `config` for measurements; `build` creates the model."""

    def __init__(self, config: TrainingConfig, dataset: Dataset, build: Callable[[], nn.Module]) -> None:
        optimizer = config.optimizer.replace(steps=ENDLESS)
        evaluation = config.evaluation.replace(logging_steps=1, eval_steps=ENDLESS)
        self._live = LiveBytes()
        self._worker = FirstWorker(MeshLayout.of(config))
        endless = config.replace(optimizer=optimizer, evaluation=evaluation)
        with self._live:
            self.model = build()
            self._live.add(_tensors(self.model))
            self._trainer = Trainer(self.model, dataset, endless, group=self._worker)

    def seconds(self, rows: int, steps: int) -> list[float]:
        """Run `steps` steps with `rows` sequences, and return the seconds of each."""
        self._worker.rows = rows
        reporter = _Steps(steps, self._trainer.elapsed)
        self._trainer.run(reporter, reporter.flag)
        return reporter.seconds

    def peak_bytes(self, rows: int) -> int:
        """Return the peak bytes of tensors during steps with `rows` sequences, weights and optimizer state included.

        Must be called before the other methods: the tensors that their steps create are not counted.
        """
        self._worker.rows = rows
        reporter = _Steps(2, self._trainer.elapsed)
        with self._live:
            self._live.peak = self._live.now
            self._trainer.run(reporter, reporter.flag)
        return self._live.peak

    @property
    def kept_bytes(self) -> int:
        """The bytes that stay allocated between steps: weights, moments, averages."""
        return self._live.now

    def flops(self, rows: int) -> int:
        """Return the FLOPs of the matrix products of a step, as counted by torch."""
        self._worker.rows = rows
        reporter = _Steps(1, self._trainer.elapsed)
        with FlopCounterMode(display=False) as counter:
            self._trainer.run(reporter, reporter.flag)
        found: int = counter.get_total_flops()
        return found


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters and buffers."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}.values())


def trained_bytes(model: nn.Module) -> int:
    """Return the bytes of the trained parameters, which are also those of their gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
