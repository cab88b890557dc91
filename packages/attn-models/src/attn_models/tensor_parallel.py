"""Tensor parallelism: heads and inner sizes are split over ranks (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053).

Each rank computes some heads of every attention layer and some columns of every feed-forward; their outputs are summed
over the ranks, once per sublayer. Embeddings, norms, routers and the unembedding are replicated on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attn_core.errors import Incompatible, InvalidValue
from attn_core.splitting import ParameterSplit, Rank, rank_layer, require_split
from torch import Tensor, nn

from attn_models.decoder.decoder import Decoder
from attn_models.decoder.layers import FeedForward, GatedFeedForward


class CopyToRanks(torch.autograd.Function):
    """The identity, whose gradient is the sum of the gradients of all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return a view of `rows`."""
        ctx.group = group
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient over the ranks."""
        total: Tensor = SumOverRanks.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return total, None


class SumOverRanks(torch.autograd.Function):
    """The sum of the inputs of all ranks, whose gradient is passed to each rank unchanged."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum `rows` over the ranks."""
        ctx.group = group
        total = rows.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        same: Tensor = CopyToRanks.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return same, None


Combine = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Collectives:
    """The operations around a split sublayer: `enter` is applied to its input, `leave` to its output."""

    enter: Combine
    leave: Combine

    @classmethod
    def over(cls, group: dist.ProcessGroup) -> Collectives:
        """Collectives for training: `CopyToRanks` and `SumOverRanks` over the ranks of a group."""

        def enter(rows: Tensor) -> Tensor:
            entered: Tensor = CopyToRanks.apply(rows, group)  # type: ignore[no-untyped-call]
            return entered

        def leave(rows: Tensor) -> Tensor:
            left: Tensor = SumOverRanks.apply(rows, group)  # type: ignore[no-untyped-call]
            return left

        return cls(enter, leave)

    @classmethod
    def serving(cls) -> Collectives:
        """Collectives for inference: outputs are summed in place, without gradients, over the default process group,
        which may be initialised after the model was split."""

        def leave(rows: Tensor) -> Tensor:
            dist.all_reduce(rows := rows.contiguous())
            return rows

        return cls(lambda rows: rows, leave)


def split_model(model: nn.Module, rank: Rank, collectives: Collectives) -> dict[str, ParameterSplit]:
    """Replace every attention layer and feed-forward of `model`, which has all weights, by the rank's part of it.

    Returns how the parameters and buffers of these layers are split, by name; all others are replicated on every rank.
    Raises the errors of `require_model_split`.
    """
    require_model_split(model, rank.size)
    found: dict[str, ParameterSplit] = {}
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in split_sites(model).items():
        part, splits = _part(module, rank)
        for own, parameter in module.named_parameters(remove_duplicate=False):
            # Parameters that layers share stay shared on every rank.
            kept = made.setdefault(parameter, part.get_parameter(own))
            owner, _, leaf = own.rpartition(".")
            setattr(part.get_submodule(owner), leaf, kept)
            kept.requires_grad_(parameter.requires_grad and not (splits[own].once and rank.index))
        _connect(part, collectives)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, part)
        found |= {f"{name}.{own}": split for own, split in splits.items()}
    if isinstance(model, Decoder):
        model.take_states_of_layers()
    return found


def split_sites(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that can be split, by name: attention layers built by mechanisms, and feed-forwards."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{known}.") for known in found)
        if not inside and (hasattr(module, "mechanism_config") or isinstance(module, FeedForward | GatedFeedForward)):
            found[name] = module
    return found


def require_model_split(model: nn.Module, ranks: int) -> None:
    """Check that a model can be split over `ranks` ranks; its tensors may be on the meta device.

    Raises `Incompatible` for a model without layers to split, or with a mechanism that cannot be split, which the
    message names; `InvalidValue` if the number of ranks does not divide heads or inner sizes.
    """
    sites = split_sites(model)
    if not sites:
        raise Incompatible(f"a {type(model).__name__} cannot be split over {ranks} ranks: it has no attention layer")
    for module in sites.values():
        if hasattr(module, "mechanism_config"):
            layer: Any = module
            require_split(layer.mechanism, layer.mechanism_config, ranks)
            continue
        inner = _down(module).in_features
        if ranks < 1 or inner % ranks:
            raise InvalidValue.of("tp", ranks, f"a divisor of the inner size {inner} of the feed-forward layers")


def _down(module: nn.Module) -> nn.Linear:
    down = getattr(module, "down", None)
    if not isinstance(down, nn.Linear):
        raise Incompatible(f"a {type(module).__name__} of packed weights cannot be split over ranks")
    return down


def _part(module: nn.Module, rank: Rank) -> tuple[nn.Module, dict[str, ParameterSplit]]:
    if hasattr(module, "mechanism_config"):
        part: tuple[nn.Module, dict[str, ParameterSplit]] = rank_layer(module, rank)
        return part
    splits: dict[str, ParameterSplit] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _part_of_linear(name, child, rank, splits))
    return module, splits


def _part_of_linear(name: str, linear: nn.Linear, rank: Rank, splits: dict[str, ParameterSplit]) -> nn.Linear:
    """The rank's part of a linear layer of a feed-forward: some of the outputs, or for `down` some of the inputs. Adds
    the splits of its parameters to `splits`."""
    axis = 1 if name == "down" else 0
    size = linear.weight.shape[axis]
    split = ParameterSplit(axis, ((size, size // rank.size),))
    own = {"weight": split}
    if linear.bias is not None:
        own["bias"] = ParameterSplit(once=True) if name == "down" else split
    part = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
    part.in_features = linear.in_features // (rank.size if axis else 1)
    part.out_features = linear.out_features // (1 if axis else rank.size)
    for leaf, how in own.items():
        whole: Tensor = getattr(linear, leaf)
        setattr(part, leaf, nn.Parameter(how.of(whole.detach(), rank), requires_grad=whole.requires_grad))
        splits[f"{name}.{leaf}"] = how
    return part.train(linear.training)


def _connect(part: Any, collectives: Collectives) -> None:
    """Register hooks that apply `collectives.enter` to the layer's inputs and `collectives.leave` to its output."""

    def entering(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part.entered = True
        rows = tuple(collectives.enter(each) if _is_rows(each) else each for each in given)
        return rows, {
            name: collectives.enter(each) if name in ROWS and _is_rows(each) else each for name, each in named.items()
        }

    def leaving(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        return collectives.leave(out)

    def left(_: nn.Module, __: Any, ___: Any) -> None:
        part.entered = False

    part.entered = False
    part.register_forward_pre_hook(entering, with_kwargs=True)
    part.register_forward_hook(leaving)
    part.register_forward_hook(left, always_call=True)
    if hasattr(part, "step"):
        part.step = partial(_summed_step, part.step, collectives)
    if hasattr(part, "parts"):
        # A fused kernel of whole blocks would omit the sum over the ranks.
        part.parts = _no_parts
    if hasattr(part, "project_kv"):
        part.project_kv = partial(_copied, part, part.project_kv, collectives)


ROWS = ("query", "source")
"""The keyword arguments of an attention layer that are hidden states and therefore copied to the ranks; keys and values
that are shared by another layer are already split."""


def _is_rows(given: object) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point()


def _summed_step(step: Callable[..., Tensor], collectives: Collectives, *args: Any, **kwargs: Any) -> Tensor:
    return collectives.leave(step(*args, **kwargs))


def _no_parts() -> None:
    return None


def _copied(part: Any, project: Callable[[Tensor], Any], collectives: Collectives, rows: Tensor) -> Any:
    """The keys and values for other layers; during the layer's own forward pass its input was copied already."""
    return project(rows if part.entered else collectives.enter(rows))


def shared_over_ranks(splits: Mapping[str, ParameterSplit]) -> list[str]:
    """The names of parameters inside split layers that are replicated on every rank, so that their gradients have to be
    summed over the ranks."""
    return [name for name, split in splits.items() if split.shared]
