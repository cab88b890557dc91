"""A decoder's parameters from a checkpoint's tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attn_core.errors import CheckpointInvalid
from torch import Tensor

from attn_models.families.door import Layout, Stored
from attn_models.weights import CheckpointFolder

Shapes = Mapping[str, tuple[int, ...]]


def read_parameters(
    folder: CheckpointFolder, door: Layout, wanted: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """A tensor for each name of `wanted`, whose tensors only say shapes; floating point becomes `dtype`.

    Raises `CheckpointInvalid` naming every missing, extra and misshaped tensor before one is read.
    """
    stored = door.stored(list(wanted))
    actual = door.canonical(folder.tensors)
    _require_match(folder, door, stored, {name: tuple(tensor.shape) for name, tensor in wanted.items()})
    parameters: dict[str, Tensor] = {}
    for item in stored:
        tensor = folder.tensors[actual[item.name]]
        whole = tensor.T if item.transposed else tensor
        whole = whole.squeeze(1) if item.single else whole
        sizes = [wanted[part].shape[0] for part in item.parts]
        for part, piece in zip(item.parts, _split(whole, sizes, item.groups), strict=True):
            # A sum that is rounded to 16 bits would lose what the checkpoint's small numbers say.
            wide = item.exact or item.below
            needed = torch.promote_types(dtype, torch.float32) if wide else dtype
            typed = (piece.to(needed) if piece.is_floating_point() else piece).contiguous()
            scaled = typed * item.factor if item.factor != 1 else typed
            parameters[part] = scaled + item.below if item.below else scaled
    return parameters


def stored_tensors(parameters: Mapping[str, Tensor], door: Layout) -> dict[str, Tensor]:
    """The checkpoint's tensors of a decoder's parameters."""
    tensors = {}
    for item in door.stored(list(parameters)):
        parts = [parameters[part].detach() for part in item.parts]
        whole = _joined(parts, item.groups)
        whole = whole - item.below if item.below else whole
        whole = whole / item.factor if item.factor != 1 else whole
        whole = whole.unsqueeze(1) if item.single else whole
        tensors[item.name] = whole.T.contiguous() if item.transposed else whole
    return tensors


def _split(whole: Tensor, sizes: list[int], groups: int) -> list[Tensor]:
    """The parts of these sizes, one after the other in each group of the first axis."""
    if len(sizes) == 1:
        return [whole]
    pieces = torch.split(whole.reshape(groups, -1, *whole.shape[1:]), [size // groups for size in sizes], dim=1)
    return [piece.flatten(0, 1) for piece in pieces]


def _joined(parts: list[Tensor], groups: int) -> Tensor:
    """The whole of which `_split` gives these parts."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.reshape(groups, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


def _require_match(folder: CheckpointFolder, door: Layout, stored: list[Stored], shapes: Shapes) -> None:
    entries = folder.tensors.entries
    actual = door.canonical(entries)
    expected = {item.name: _shape(item, shapes) for item in stored}
    problems = [f"tensor {name!r} is missing" for name in expected if name not in actual]
    for name, own in actual.items():
        if name not in expected:
            if name != door.head and not door.derives(name):
                problems.append(f"tensor {own!r} has no place in the model")
        elif entries[own].shape != expected[name]:
            given, needed = list(entries[own].shape), list(expected[name])
            problems.append(f"tensor {own!r} has shape {given}; its model needs {needed}")
    if problems:
        raise CheckpointInvalid.of(folder.path, "; ".join(sorted(problems)))


def _shape(item: Stored, shapes: Shapes) -> tuple[int, ...]:
    parts = [shapes[part] for part in item.parts]
    shape = (sum(part[0] for part in parts), *parts[0][1:]) if len(parts) > 1 else parts[0]
    shape = (shape[0], 1, *shape[1:]) if item.single else shape
    return shape[::-1] if item.transposed else shape


def stored_type(checkpoint: CheckpointFolder) -> torch.dtype:
    """bfloat16 where all weights are stored so, else float32."""
    types = {entry.dtype for entry in checkpoint.tensors.entries.values()}
    return torch.bfloat16 if types == {"BF16"} else torch.float32
