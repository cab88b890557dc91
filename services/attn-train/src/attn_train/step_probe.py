"""One worker's part of a step, run for real with few rows: how many bytes it holds, and how long it takes."""

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

from attn_train.group import Group
from attn_train.layout import MeshLayout
from attn_train.precision import set_up_blocks
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import Dataset
from attn_train.trainer import NullReporter, Trainer

ENDLESS = 2**31 - 1


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations within it made and that are still referred to, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Count these tensors, too, each storage once."""
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
        """The operation, and what it made."""
        made = func(*args, **(kwargs or {}))
        self.add([leaf for leaf in tree_leaves(made) if type(leaf) is Tensor or isinstance(leaf, nn.Parameter)])
        return made


def _same(rows: Tensor) -> Tensor:
    return rows


class FirstWorker(Group):
    """The first of the workers of a layout, alone: its heads, its rows, its tokens, of which at most `rows` rows.

    What others would send is left out: numbers are wrong, sizes are right.
    """

    def __init__(self, layout: MeshLayout) -> None:
        self.rows = ENDLESS
        self._layout = layout

    def set_up(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """See `Group.set_up`; blocks are not sharded."""
        if self._layout.tp > 1:
            split_model(model, Rank(0, self._layout.tp), Collectives(_same, _same))
        set_up_blocks(model, config)
        return model

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The first rows, and with context parallelism the first of their tokens."""
        if self._layout.workers == 1 and self.rows >= len(batch[0]):
            return batch
        rows = min(self.rows, len(batch[0]) // self._layout.dp)
        mine = tuple(part[:rows] for part in batch)
        return mine if self._layout.cp == 1 else tuple(part[:, : part.shape[1] // self._layout.cp] for part in mine)


class _Steps(NullReporter):
    """Stops a run after so many steps, and keeps the seconds of each."""

    def __init__(self, steps: int, elapsed: float) -> None:
        self.flag = StopFlag()
        self.seconds: list[float] = []
        self._steps, self._before = steps, elapsed

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """After each step."""
        del step
        self.seconds.append(values["elapsed_seconds"] - self._before)
        self._before = values["elapsed_seconds"]
        if len(self.seconds) >= self._steps:
            self.flag.set(Stop.DISCARD)


class StepProbe:
    """A model in training on one worker's part of the batches of `config`; `build` makes the model."""

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
        """Of each of `steps` steps."""
        self._worker.rows = rows
        told = _Steps(steps, self._trainer.elapsed)
        self._trainer.run(told, told.flag)
        return told.seconds

    def peak_bytes(self, rows: int) -> int:
        """The most bytes of tensors during a step, everything that stays between steps included.

        Asked first of all: what other steps make is not counted.
        """
        self._worker.rows = rows
        told = _Steps(2, self._trainer.elapsed)
        with self._live:
            self._live.peak = self._live.now
            self._trainer.run(told, told.flag)
        return self._live.peak

    @property
    def kept_bytes(self) -> int:
        """What stays between steps: weights, moments, averages."""
        return self._live.now

    def flops(self, rows: int) -> int:
        """The FLOPs of the matrix products of a step, as torch's counter has them."""
        self._worker.rows = rows
        told = _Steps(1, self._trainer.elapsed)
        with FlopCounterMode(display=False) as counter:
            self._trainer.run(told, told.flag)
        found: int = counter.get_total_flops()
        return found


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}.values())


def trained_bytes(model: nn.Module) -> int:
    """Bytes of parameters that are trained, and of their gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
