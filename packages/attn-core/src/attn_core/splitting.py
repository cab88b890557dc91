"""Tensor parallelism: how the heads of a layer are split over ranks, with the config and tensors of each rank's layer.

A layer that does not combine heads before its output projection is the sum of layers with some of its heads each.
Input projections are split by their outputs (column-parallel, in Megatron's words: Shoeybi et al. 2019, arXiv
1909.08053), the output projection by its inputs (row-parallel), and the outputs of all ranks are added up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attn_core.config import MechanismConfig
from attn_core.errors import Incompatible, InvalidValue, MechanismInvalid
from attn_core.heads import HeadRange
from attn_core.mechanism import Capability, Mechanism
from attn_core.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

OUTPUT_BIAS = "output.bias"
"""The bias that is added once to the sum over all ranks: the first rank has it, the others have zeros."""


@dataclass(frozen=True)
class Rank:
    """One of the `size` ranks that a layer is split over; `index` is counted from 0."""

    index: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.index < self.size:
            raise InvalidValue.of("rank", f"{self.index} of {self.size}", "an index from 0, below the number of ranks")


@dataclass(frozen=True)
class ParameterSplit:
    """How a learned tensor is split over ranks.

    With `axis` None, every rank has the whole tensor, and its gradients are to be added up over the ranks; with `once`,
    the first rank has it and the others have zeros. Else `axis` consists of `blocks`, pairs of a block's size in the
    whole layer and in a rank's: if they are equal, every rank has the block, else it is cut into equal parts, one per
    rank.
    """

    axis: int | None = None
    blocks: tuple[tuple[int, int], ...] = ()
    once: bool = False

    @property
    def shared(self) -> bool:
        """Whether every rank has elements that the other ranks have, too."""
        return not self.once and (self.axis is None or any(whole == part for whole, part in self.blocks))

    def indices(self, rank: Rank) -> list[int]:
        """The indices along `axis` that a rank has, in its order; only for a tensor that is split."""
        found: list[int] = []
        start = 0
        for whole, part in self.blocks:
            first = start + (0 if whole == part else rank.index * part)
            found += range(first, first + part)
            start += whole
        return found

    def of(self, tensor: Tensor, rank: Rank) -> Tensor:
        """The elements that a rank has of the whole `tensor`, as a new tensor."""
        if self.once:
            return tensor.clone() if rank.index == 0 else tensor.new_zeros(tensor.shape)
        if self.axis is None:
            return tensor.clone()
        return tensor[(slice(None),) * self.axis + (self.indices(rank),)]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the parts of all ranks, in order; blocks that every rank has are taken from the last rank."""
        if self.axis is None:
            return parts[0]
        size = sum(whole for whole, _ in self.blocks)
        shape = list(parts[0].shape)
        shape[self.axis] = size
        found = parts[0].new_zeros(shape)
        for index, part in enumerate(parts):
            found[(slice(None),) * self.axis + (self.indices(Rank(index, len(parts))),)] = part
        return found


def require_split(mechanism: Mechanism, config: MechanismConfig, ranks: int) -> None:
    """Raise `Incompatible`, with the mechanism's name, if its heads cannot be split over ranks, and `InvalidValue` if
    the number of ranks does not divide them.
    """
    spec = mechanism.spec(config)
    why = None
    if not mechanism.splits_heads:
        why = "it does not declare that its heads are computed independently (splits_heads)"
    elif config.heads_of is not None:
        why = "its heads are split already"
    elif spec is not None and (dependent_parts := _head_dependent_parts(mechanism, spec)):
        why = f"its {dependent_parts} may depend on the index of a head"
    elif spec is not None and spec.mask.heads is not None:
        why = "each head has a mask of its own"
    elif spec is not None and spec.heads.per_group is None:
        why = "its key/value heads are shared by unequal groups"
    if why is not None:
        message = f"mechanism {mechanism.name!r} cannot be split over {ranks} ranks: {why}"
        raise Incompatible(message, mechanism=mechanism.name)
    heads, shared = config.num_heads, kv_heads(mechanism, config)
    if ranks < 1 or heads % ranks or (shared % ranks and shared != 1):
        allowed = f"a divisor of the {heads} query heads"
        allowed += "" if shared in {1, heads} else f" and of the {shared} key/value heads"
        raise InvalidValue.of("tp", ranks, f"{allowed} of mechanism {mechanism.name!r}")


def _head_dependent_parts(mechanism: Mechanism, spec: AttentionSpec) -> str:
    """The names of the spec's parts that depend on head indices; none if the mechanism itself sets `splits_heads`."""
    if getattr(type(mechanism), "splits_heads", None) is True:
        return ""
    return " and ".join(place for place, part in spec.parts.items() if not part.splits_heads)


def kv_heads(mechanism: Mechanism, config: MechanismConfig) -> int:
    """The number of key/value heads of a layer."""
    spec = mechanism.spec(config)
    return config.head_layout.key_value if spec is None else spec.heads.key_value


def rank_config(mechanism: Mechanism, config: MechanismConfig, rank: Rank) -> MechanismConfig:
    """The config of a rank's layer, whose output is one term of the sum that is the whole layer's output.

    Raises the errors of `require_split`.
    """
    if rank.size == 1:
        return config
    require_split(mechanism, config, rank.size)
    heads, layout = config.num_heads // rank.size, config.head_layout
    grouped = mechanism.can(Capability.GROUPED)
    own = mechanism.split_options(config, rank.size)
    return dataclasses.replace(
        config,
        **own,
        num_heads=heads,
        num_kv_heads=max(1, kv_heads(mechanism, config) // rank.size) if grouped else None,
        head_dim=layout.key_size,
        heads_of=HeadRange(first=rank.index * heads, total=config.num_heads),
    )


def option_of_rank(mechanism: Mechanism, name: str, count: int | None, ranks: int) -> dict[str, int]:
    """The option `name` of a rank's layer, which has an equal share of the `count` of the whole; none if that is None.

    Raises `InvalidValue` if the ranks do not divide it.
    """
    if count is not None and count % ranks:
        raise InvalidValue.of("tp", ranks, f"a divisor of the {count} {name} of mechanism {mechanism.name!r}")
    return {} if count is None else {name: count // ranks}


Shapes = Mapping[str, Sequence[int]]
"""Shapes of the learned tensors, or of the buffers, of a layer by name."""


def parameter_splits(
    mechanism: Mechanism, config: MechanismConfig, whole: Shapes, part: Shapes, ranks: int
) -> dict[str, ParameterSplit]:
    """How each tensor of a layer is split, by name, given the shapes in the `whole` layer and in a rank's, `part`.

    An axis that is shorter in a rank's layer is split. Raises `MechanismInvalid` for a tensor that cannot be split so.
    """
    first = rank_config(mechanism, config, Rank(0, ranks))
    joint, first_joint = mechanism.joint_parameters(config), mechanism.joint_parameters(first)
    if whole.keys() != part.keys():
        names = sorted(whole.keys() ^ part.keys())
        raise _unsplit(mechanism, f"only the whole layer or only a rank's layer has {', '.join(names)}")
    found = {}
    for name, shape in whole.items():
        own = part[name]
        axes = [axis for axis, (size, part_size) in enumerate(zip(shape, own, strict=True)) if size != part_size]
        if not axes:
            found[name] = ParameterSplit(once=name == OUTPUT_BIAS)
            continue
        axis = axes[0]
        blocks = tuple(zip(joint.get(name, (shape[axis],)), first_joint.get(name, (own[axis],)), strict=True))
        fits = all(size in {part_size, part_size * ranks} for size, part_size in blocks)
        if len(axes) > 1 or not fits or sum(size for size, _ in blocks) != shape[axis]:
            raise _unsplit(mechanism, f"{name} has shape {tuple(shape)} in the whole layer and {tuple(own)} on a rank")
        found[name] = ParameterSplit(axis, blocks)
    return found


def _unsplit(mechanism: Mechanism, what: str) -> MechanismInvalid:
    remedy = "declare the blocks of concatenated tensors in joint_parameters(), or do not set splits_heads"
    return MechanismInvalid.of(mechanism.name, f"declares splits_heads, but {what}", remedy)


def rank_layer(layer: Any, rank: Rank) -> tuple[Any, dict[str, ParameterSplit]]:
    """Build the layer of a rank, with its elements of the learned tensors and buffers of the whole `layer`; returns it
    and how each tensor is split, by name.

    `layer` was built by its mechanism. Raises the errors of `rank_config` and `parameter_splits`.
    """
    mechanism, config = layer.mechanism, layer.mechanism_config
    part = mechanism.build(rank_config(mechanism, config, rank))
    whole, mine = layer.state_dict(), part.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    own = {name: tuple(tensor.shape) for name, tensor in mine.items()}
    splits = parameter_splits(mechanism, config, shapes, own, rank.size)
    for tensor in whole.values():
        if tensor.is_floating_point():
            part.to(device=tensor.device, dtype=tensor.dtype)
            break
    part.load_state_dict({name: split.of(whole[name], rank) for name, split in splits.items()})
    return part.train(layer.training), splits
