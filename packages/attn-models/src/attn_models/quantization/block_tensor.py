"""Weights that are kept in the quantized blocks in which they are stored until they are packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attn_core.kernels.linear import MOST_BITS
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attn_models.weights.block_layouts import BlockLayout


def stays_in_blocks(quantization: str | None, dtype: str, device: str) -> bool:
    """Whether weights that are stored in quantized blocks are loaded as blocks, for kernels that multiply them."""
    computed = {"cpu": ("float32",), "cuda": ("float32", "bfloat16", "float16")}.get(device, ())
    return bool(computed) and (quantization in MOST_BITS or (quantization == "auto" and dtype in computed))


class BlockTensor(Tensor):
    """A float32 matrix [outputs, inputs] stored as uint8 `blocks` [outputs, bytes of a row] in the layout `kind`.

    Splitting its rows keeps them in blocks; for every other operation the weights are temporarily dequantized to
    float32.
    """

    blocks: Tensor
    kind: BlockLayout

    @staticmethod
    def __new__(cls, blocks: Tensor, kind: BlockLayout) -> BlockTensor:
        """Create a tensor from bytes in whole blocks, on any device."""
        inputs = blocks.shape[1] // kind.nbytes * kind.inputs
        made: BlockTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 -- torch's own way to make one
            cls, (blocks.shape[0], inputs), dtype=torch.float32, device=blocks.device
        )
        made.blocks, made.kind = blocks.detach(), kind
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"BlockTensor({tuple(self.shape)}, {self.kind.weights})"

    def detach(self) -> BlockTensor:
        """The same blocks as another tensor; torch's own way would import its distributed tensors, in half a second."""
        return BlockTensor(self.blocks, self.kind)

    def rows(self, places: Tensor) -> Tensor:
        """The rows at `places` [...] in float32: [..., inputs]."""
        found = BlockTensor(self.blocks[places.reshape(-1)], self.kind).plain()
        return found.view(*places.shape, self.shape[1])

    def plain(self) -> Tensor:
        """A copy of the weights in float32 on the device of the blocks; they are dequantized on the CPU."""
        rows = self.blocks.contiguous().cpu().numpy()
        return torch.from_numpy(self.kind.dequantized(rows)).to(self.blocks.device)

    # torch's stubs declare this only as the attribute that disables it.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on blocks if it only selects whole rows, else on the weights in float32."""
        del types
        if func in _SAME:
            return cls(args[0].blocks, args[0].kind)
        if func is _aten.split_with_sizes.default and args[2:] in ((), (0,)):
            return [cls(part, args[0].kind) for part in args[0].blocks.split(args[1])]
        if func is _aten.embedding.default:
            return args[0].rows(args[1])
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, BlockTensor) else value


def same_blocks(matrices: Sequence[Tensor], bits: Mapping[str, int], most: int) -> list[BlockTensor]:
    """The matrices if all are in the same kind of blocks of at most `most` bits per weight (`bits` by format), else
    none."""
    kept = [matrix for matrix in matrices if isinstance(matrix, BlockTensor) and bits[matrix.kind.weights] <= most]
    return kept if len(kept) == len(matrices) and len({matrix.kind.weights for matrix in kept}) == 1 else []


def plain_matrix(matrices: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Matrices [outputs, inputs] concatenated along their outputs, dequantized, and as `dtype` if it is given."""
    plain = [matrix.plain() if isinstance(matrix, BlockTensor) else matrix for matrix in matrices]
    typed = plain if dtype is None else [matrix.to(dtype) for matrix in plain]
    return torch.cat(typed) if len(typed) > 1 else typed[0]


def widen_parameters(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Dequantize all parameters in blocks to `dtype`, in new memory; tied parameters stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, BlockTensor):
                plain = made.setdefault(id(parameter), nn.Parameter(parameter.plain().to(dtype), requires_grad=False))
                setattr(module, name, plain)
