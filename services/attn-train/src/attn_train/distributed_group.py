"""Training by several workers with torch.distributed: data, sharded, tensor and context parallelism.

The losses are those of a single worker. All workers draw the same batch; each computes some of its sequences, and with
context parallelism some of their tokens, and gradients are summed. Blocks are sharded by FSDP2 (`fully_shard`; Zhao et
al. 2023, arXiv 2304.11277), heads and inner sizes are split as in Megatron-LM (arXiv 1909.08053), and tokens are split
with ring attention (Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attn_core.errors import Incompatible, InvalidValue
from attn_core.splitting import ParameterSplit, Rank
from attn_models.decoder.mixture_of_experts import Router
from attn_models.tensor_parallel import Collectives, shared_over_ranks, split_model
from attn_schema.training import TrainingConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from attn_train.layout import MeshLayout
from attn_train.precision import blocks_of, set_up_blocks
from attn_train.process_group import Group, Tensors
from attn_train.records import Stop
from attn_train.sharded_checkpoint import Block, Held, Pieces

BUCKET = 25 << 20
"""Bytes of gradients that are all-reduced in one call, as in torch's DistributedDataParallel."""

STOPS: tuple[Stop | None, ...] = (None, Stop.SAVE, Stop.DISCARD)


class LocalParameters(nn.Module):
    """A worker's part of a model's parameters: the local shard, in the same memory, of those that are sharded."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Not one of its own modules: the parameters are those under `kept`.
        self._model = (model,)
        self.whole = dict(model.named_parameters())
        self.kept = {name: _local(parameter) for name, parameter in self.whole.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the worker's parameters under their names in the model."""
        yield from self.kept.items()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model, which say how the parameters under their names are updated."""
        yield from self._model[0].named_modules(*args, **kwargs)

    def take_gradients(self) -> None:
        """Move the gradients of the model's parameters to the worker's parameters."""
        for name, parameter in self.whole.items():
            own = self.kept[name]
            if own is not parameter:
                grad, parameter.grad = parameter.grad, None
                own.grad = grad.to_local() if isinstance(grad, DTensor) else grad


def _local(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)


class DistributedGroup(Group):
    """A worker of a group; the default process group must have been initialised."""

    def __init__(self, layout: MeshLayout, device_type: str) -> None:
        self.layout = layout
        self.workers = layout.workers
        self.mesh = mesh_of(layout, device_type)
        self.rank = dist.get_rank()
        self.leads = self.rank == 0
        self.tp = Rank(self.mesh.get_local_rank("tp"), layout.tp)
        self._data = self.mesh["dp_replicate", "cp", "dp_shard"]._flatten("data").get_group()  # noqa: SLF001 -- torch's own way
        self._tp = self.mesh["tp"].get_group()
        self.hosts, self.writers = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        self._context: Any = None
        self._splits: Mapping[str, ParameterSplit] = {}
        self._partial: list[str] = []
        self._kept = LocalParameters(nn.Module())
        self._model = nn.Module()

    def set_up(self, model: nn.Module, config: TrainingConfig) -> nn.Module:
        """See `Group.set_up`; splits the heads and the context, prepares the blocks, and shards them."""
        if self.tp.size > 1:
            self._splits = split_model(model, self.tp, Collectives.over(self._tp))
            self._partial = shared_over_ranks(self._splits)
        if self.layout.cp > 1:
            self._context = split_context(model, self.mesh["cp"].get_group())
        set_up_blocks(model, config)
        for module in model.modules():
            if isinstance(module, Router):
                module.summed = self.summed
        if self.layout.dp_shard > 1:
            self._shard(model)
        self._model, self._kept = model, LocalParameters(model)
        return self._kept

    def share(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return this worker's sequences of a batch, and with context parallelism its tokens of each."""
        index, count = self._place_in_data()
        rows = len(batch[0])
        if any(len(part) != rows for part in batch) or rows % count:
            sizes = [len(part) for part in batch]
            raise InvalidValue.of("batch", sizes, f"tensors with the same number of rows, a multiple of {count}")
        mine = tuple(part.tensor_split(count)[index] for part in batch)
        if self._context is None:
            return mine
        ranks = self.layout.cp
        return tuple(part[:, self._context.positions(part.shape[1] // ranks)] for part in mine)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """See `Group.updating`; with context parallelism, the model computes this worker's tokens of each sequence."""
        if self._context is None:
            yield
            return
        with self._context.splitting():
            yield

    def summed(self, value: Tensor) -> Tensor:
        """See `Group.summed`; sums over all workers with different sequences or tokens."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self._data)
        return total

    def summed_on_hosts(self, value: Tensor) -> Tensor:
        """See `Group.summed_on_hosts`."""
        total = value.clone()
        dist.all_reduce(total, group=self.hosts)
        return total

    def finish_gradients(self) -> None:
        """See `Group.finish_gradients`; sums over the workers. A parameter without any gradient keeps none."""
        self._kept.take_gradients()
        kept = list(self._kept.kept.items())
        seen = torch.tensor([own.grad is not None for _, own in kept], dtype=torch.int32)
        seen = seen.to(kept[0][1].device)
        for group in (self._data, self._tp):
            dist.all_reduce(seen, op=dist.ReduceOp.MAX, group=group)
        # Parameters that only one rank holds are frozen on the others.
        reached = [item for item, found in zip(kept, seen.tolist(), strict=True) if found and item[1].requires_grad]
        for _, own in reached:
            if own.grad is None:
                own.grad = torch.zeros_like(own)
        plain = [own.grad for name, own in reached if own is self._kept.whole[name]]
        summed_in_buckets(plain, self._data)
        summed_in_buckets([own.grad for name, own in reached if name in self._partial], self._tp)

    def clip(self, trained: list[nn.Parameter], limit: float) -> Tensor:
        """See `Group.clip`; equal to `torch.nn.utils.clip_grad_norm_` of the whole model."""
        del trained
        kept = {name: own for name, own in self._kept.kept.items() if own.grad is not None}
        device = next(iter(self._kept.kept.values())).device
        # Sums of squares, indexed by [sharded, split over heads].
        squares = torch.zeros(2, 2, dtype=torch.float64, device=device)
        for name, own in kept.items():
            split = name in self._splits and name not in self._partial
            sharded = own is not self._kept.whole[name]
            squares[int(sharded), int(split)] += own.grad.double().square().sum()  # type: ignore[union-attr]
        over_heads = squares[:, 1].contiguous()
        dist.all_reduce(over_heads, group=self._tp)
        sums = squares[:, 0] + over_heads
        sharded_sum = sums[1].clone()
        dist.all_reduce(sharded_sum, group=self.mesh["dp_shard"].get_group())
        norm = (sums[0] + sharded_sum).sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for own in kept.values():
            own.grad.mul_(scale.to(own.grad.dtype))  # type: ignore[union-attr]
        return norm

    def updated(self, step: int) -> None:
        """Raise `Incompatible` if a buffer differs between workers, because a layer updated it from its own part of the
        batch. Checked after updates 1, 2, 4, 8, ..."""
        if step & (step + 1):
            return
        for name, buffer in self._model.named_buffers():
            if buffer.is_floating_point() and buffer.numel():
                ends = torch.stack([buffer.detach().sum(), -buffer.detach().sum()]).double()
                dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._data)
                if float(ends.sum()) != 0:
                    message = (
                        f"{name} is updated from the whole batch, which {self.workers} workers split: use 1 worker"
                    )
                    raise Incompatible(message, field="config.workers")

    def whole(self, tensors: Tensors) -> dict[str, Tensor]:
        """Gather whole tensors from the shards and from the ranks that split heads."""
        found = {}
        for key, tensor in tensors.items():
            name = key.rpartition(":")[2]
            parameter: Any = self._kept.whole.get(name)
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(parameter, DTensor) and tensor.dim():
                own = self._all_gather_rows(own.detach(), parameter.shape[0])
            split = self._splits.get(name)
            # Tensors without a split axis that only one rank holds are taken from the leading rank.
            if split is not None and split.axis is not None and tensor.dim():
                parts = [torch.empty_like(own.contiguous()) for _ in range(self.tp.size)]
                dist.all_gather(parts, own.contiguous(), group=self._tp)
                own = split.whole(parts)
            found[key] = own
        return found

    def held(self, tensors: Tensors) -> dict[str, Held]:
        """See `Group.held`; the blocks of this worker's shard and of its rank's heads."""
        return {key: self._held(key.rpartition(":")[2], tensor.detach()) for key, tensor in tensors.items()}

    def _held(self, name: str, own: Tensor) -> Held:
        parameter: Any = self._kept.whole.get(name)
        split = self._splits.get(name)
        sharded = isinstance(parameter, DTensor)
        if not own.dim() or not (sharded or split is not None):
            return own
        shape, first = list(own.shape), 0
        if sharded:
            shape[0] = parameter.shape[0]
            first = self.mesh.get_local_rank("dp_shard") * -(-shape[0] // self.layout.dp_shard)
        if split is None:
            return rows_from(own, shape, first)
        return blocks_of_rank(own, shape, first, split, self.tp)

    def random_states(self, states: Tensors) -> dict[str, Tensor]:
        """See `Group.random_states`; all states of the leading worker, and those of dropout on each of the others."""
        if self.leads:
            return {**states, "workers": torch.tensor(self.workers)}
        return {f"cpu-of-{dist.get_rank()}": states["cpu"]}

    def own_random_states(self, states: Tensors, seed: Callable[[str], int]) -> dict[str, Tensor]:
        """See `Group.own_random_states`; for another number of workers, dropout is seeded anew."""
        before = int(states["workers"]) if "workers" in states else 1
        rank = dist.get_rank()
        if before != self.workers:
            own = torch.Generator().manual_seed(seed(self.dropout_use())).get_state()
        else:
            own = states["cpu"] if rank == 0 else states[f"cpu-of-{rank}"]
        return {**states, "cpu": own}

    def dropout_use(self) -> str:
        """See `Group.dropout_use`; equal for ranks that split heads, different for workers with other sequences."""
        index = dist.get_rank() // self.tp.size
        return "dropout" if index == 0 else f"dropout of {index}"

    def agreed(self, asked: Stop | None) -> Stop | None:
        """See `Group.agreed`."""
        return STOPS[self._broadcast(STOPS.index(asked))]

    def agreed_step(self, step: int) -> int:
        """See `Group.agreed_step`."""
        return self._broadcast(step)

    def agreed_choice(self, *, chosen: bool) -> bool:
        """See `Group.agreed_choice`."""
        return bool(self._broadcast(int(chosen)))

    def whole_model(self, model: nn.Module, saved: Tensors, rebuild: Callable[[], Any] | None) -> nn.Module | None:
        """See `Group.whole_model`."""
        if self.layout.tp == self.layout.dp_shard == 1:
            return model if self.leads else None
        tensors = self.whole(saved)
        if not self.leads or rebuild is None:
            return None
        whole: nn.Module = rebuild()
        load_whole(whole, tensors)
        return whole

    def lost_others(self, error: Exception) -> bool:
        """See `Group.lost_others`; these are errors of torch.distributed and gloo."""
        return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))

    def _all_gather_rows(self, own: Tensor, rows: int) -> Tensor:
        """Gather a tensor of `rows` rows that is sharded as by FSDP: all shards have equally many rows, except the last
        ones, which have fewer or none."""
        shard_rows = -(-rows // self.layout.dp_shard)
        padded = own.new_zeros(shard_rows, *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.layout.dp_shard)]
        dist.all_gather(parts, padded, group=self.mesh["dp_shard"].get_group())
        return torch.cat(parts)[:rows]

    def _broadcast(self, number: int) -> int:
        """Return the number of the leading worker."""
        value = torch.tensor(number, device=next(iter(self._kept.kept.values())).device)
        dist.broadcast(value, 0)
        return int(value)

    def _place_in_data(self) -> tuple[int, int]:
        """Return the index of this worker's part of the batch's sequences, and the number of parts."""
        replicate, shard = (self.mesh.get_local_rank(name) for name in ("dp_replicate", "dp_shard"))
        return replicate * self.layout.dp_shard + shard, self.layout.dp

    def _shard(self, model: nn.Module) -> None:
        """Shard the blocks with FSDP2; all other parameters are replicated on every worker."""
        replicas = self.mesh["dp_replicate", "cp"]._flatten("replicas")  # noqa: SLF001 -- torch's own way
        mesh = self.mesh["dp_shard"] if replicas.size() == 1 else sharding_mesh(self.mesh)
        for block in blocks_of(model):
            # Each block is an FSDP root, which by default is not resharded after its forward pass.
            sharded: FSDPModule = fully_shard(block, mesh=mesh, reshard_after_forward=True)
            # Gradients are summed, not averaged: losses are already divided by the size of the whole batch.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_reduce_scatter_unused_params(True)
            for method in ("project_kv", "weights"):
                if hasattr(block, method):
                    register_fsdp_forward_method(block, method)


def rows_from(own: Tensor, shape: list[int], first: int) -> Pieces:
    """Return a worker's part of a whole tensor of this shape: the rows `own`, beginning at row `first`, or none."""
    block = Block((first,) + (0,) * (own.dim() - 1), own)
    return Pieces(torch.Size(shape), (block,) if own.numel() else ())


def blocks_of_rank(own: Tensor, shape: list[int], first: int, split: ParameterSplit, rank: Rank) -> Pieces:
    """Return a rank's blocks of a whole tensor that is split over heads.

    `own` are the rows, beginning at row `first`, of the rank's part, which has the shape `shape`.
    """
    if split.axis is None:
        # A parameter that only one rank holds belongs to the first one.
        return Pieces(torch.Size(shape), ()) if split.once and rank.index else rows_from(own, shape, first)
    found, of_whole, of_part = [], 0, 0
    for whole, part in split.blocks:
        place = of_whole + (0 if whole == part else rank.index * part)
        offsets, begin, end = [0] * own.dim(), of_part, of_part + part
        offsets[0] = first
        if split.axis == 0:
            begin, end = max(begin, first), min(end, first + len(own))
            offsets[0] = place + begin - of_part
            rows = own[begin - first : max(end, begin) - first]
        else:
            offsets[split.axis] = place
            rows = own.narrow(split.axis, begin, part)
        if rows.numel():
            found.append(Block(tuple(offsets), rows))
        of_whole, of_part = of_whole + whole, of_part + part
    shape[split.axis] = of_whole
    return Pieces(torch.Size(shape), tuple(found))


def sharding_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh [replicas, shards] for hybrid sharding, from a mesh [dp_replicate, cp, dp_shard, tp]."""
    ranks = mesh.mesh.flatten(0, 1)
    both = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("replicas", "shards", "heads"))
    return both["replicas", "shards"]


def mesh_of(layout: MeshLayout, device_type: str) -> DeviceMesh:
    """Create the device mesh of a layout, with torchtitan's dimension names."""
    sizes = (layout.dp_replicate, layout.cp, layout.dp_shard, layout.tp)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "cp", "dp_shard", "tp"))


def summed_in_buckets(gradients: list[Any], group: dist.ProcessGroup) -> None:
    """All-reduce gradients over a group, in place, in buckets of about `BUCKET` bytes."""
    if group.size() == 1:
        return
    bucket: list[Tensor] = []
    size = 0
    for place, gradient in enumerate(gradients):
        bucket.append(gradient)
        size += gradient.nbytes
        following = gradients[place + 1] if place + 1 < len(gradients) else None
        if following is None or size >= BUCKET or following.dtype != gradient.dtype:
            flat = torch.cat([part.reshape(-1) for part in bucket])
            dist.all_reduce(flat, group=group)
            for part, summed in zip(bucket, torch.split(flat, [part.numel() for part in bucket]), strict=True):
                part.copy_(summed.view_as(part))
            bucket, size = [], 0


def split_context(model: nn.Module, group: dist.ProcessGroup) -> Any:
    """Make a decoder's attention layers use ring attention over a group; returns the context that splits tokens."""
    layers: list[Any] = [module for module in model.modules() if getattr(module, "splits_tokens", False)]
    context = layers[0].split_tokens(group)
    decoder: Any = model
    decoder.places = lambda count: context.positions(count) if context.active else None
    for layer in layers:
        layer.context = context
    return context


@torch.no_grad()
def load_whole(model: nn.Module, tensors: Tensors) -> None:
    """Copy tensors, by name, into the parameters and buffers of a model."""
    names: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        names[name].copy_(tensor)
