"""Prepacking and quantizing the weights of a model for inference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from attn_core import installed
from attn_core.errors import Incompatible, WrongState
from attn_core.kernels.block import BlockKernel, BlockParts, block_problem
from attn_core.kernels.dispatch import explain
from attn_core.kernels.linear import BLOCK_FORMATS, LinearProblem, Pack, choose_linear, explain_linear
from attn_core.states import dtype_name
from torch import Tensor, nn

from attn_models.decoder.block import Block
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.block_tensor import BlockTensor, blocks_of, widen_parameters
from attn_models.quantization.modules import SideBySide, StoredEmbedding, linear_of

PARTS = ("attention", "cross", "feed_forward", "cell")
"""What a model or a block of its calls the parts that may have a method `pack`."""

ATTENTIONS = ("attention", "cross")
"""Those of the parts whose further linear layers are packed, too, one by one."""

NARROWEST = 32
"""Linear layers of attentions with fewer inputs or outputs stay as they are: gates, decays and ranks of low-rank pairs,
which hold few weights and decide over whole heads."""


def quantize_model(
    model: Any, quantization: str, dtype: torch.dtype = torch.float32, kernel: str | None = None
) -> None:
    """Keep the weights of the model's linear layers in the format `quantization` from now on, and compute in `dtype`.

    Feed-forwards, the unembedding (a tied one too), attentions and those cells that have a method `pack` are packed,
    each layer by the cheapest installed `LinearKernel` that can, or by the one called `kernel`; steps of whole blocks
    of a `Decoder` are computed by a `BlockKernel` where one can. What an attention's own `pack` leaves, or one without
    it has, is packed layer by layer, but for narrow layers (`NARROWEST`) and those whose matrices the attention reads
    apart from their products, which it names in `read_weights`. With `int4` the unembedding is kept as int8: it is
    where fewer bits hurt most. The embedding of a model with a `head` keeps the type it has; norms and what is not
    packed become `dtype`. Weights that are stored in blocks of whole numbers (`BlockTensor`) stay in these where a
    kernel multiplies them so and they take no more bits than the format; formats of floats then round no inputs.
    Afterwards the model can be run, but neither trained nor saved.

    Raises `InvalidValue` for an unknown format, `KernelRefused` where nobody can pack a layer, `WrongState` for a
    model that is packed already, `Incompatible` for one of which nothing can be packed.
    """
    require_not_quantized(model, "the model's weights are packed already, as {}")

    def pack(layers: Sequence[nn.Linear], form: str = quantization) -> nn.Module:
        return _packed(layers, form, kernel if form == quantization else None)

    parts = _packing_parts(model)
    if not can_quantize(model):
        raise Incompatible(f"no layer of a {type(model).__name__} can be packed; load it with quantization=none")
    with torch.no_grad():
        for part in parts:
            part.pack(pack)
        for attention in _parts(model, ATTENTIONS):
            _pack_rest(attention, pack)
        last = "int8" if quantization == "int4" else quantization
        if hasattr(model, "head"):
            model.head = pack([getattr(model, "unembedding", None) or linear_of(model.embedding.weight, None)], last)
            model.embedding, model.unembedding = StoredEmbedding(model.embedding.weight, dtype), None
        elif hasattr(model, "unembedding"):
            model.unembedding = pack([model.unembedding], last)
        if isinstance(model, Decoder) and model.positions is not None:
            model.positions = StoredEmbedding(model.positions.weight, dtype)
        widen_parameters(model)
        _convert_parameters(model, dtype)
    if isinstance(model, Decoder):
        _join(model)
    model.quantization = quantization


MOST_BITS = {"int8": 8, "int4": 4}
"""Formats that say how many bits a weight takes at most, and round inputs."""


def _packed(layers: Sequence[nn.Linear], form: str, kernel: str | None) -> nn.Module:
    """Layers of one input as one; those that are stored in blocks stay so where these take no more bits than `form`.

    A format of floats rounds no inputs, whatever blocks weights are in.
    """
    matrices = [layer.weight.detach() for layer in layers]
    if any(isinstance(matrix, BlockTensor) for matrix in matrices):
        kept = blocks_of(matrices, BLOCK_FORMATS, MOST_BITS.get(form, 8))
        if kept is not None:
            found = _of_blocks(kept, layers, form)
            if found is not None:
                return found
        elif len(layers) > 1:
            return _side_by_side([_packed([layer], form, kernel) for layer in layers])
    weight = torch.cat(matrices) if len(layers) > 1 else matrices[0]
    if isinstance(weight, BlockTensor):
        weight = weight.plain()
    problem = LinearProblem(
        weights=form,
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        dtype=str(weight.dtype).removeprefix("torch."),
        device=weight.device.type,
    )
    packed: nn.Module = choose_linear(installed().linears, problem, kernel).pack(weight, _bias_of(layers))
    return packed


def _bias_of(layers: Sequence[nn.Linear]) -> Tensor | None:
    # torch's stubs say that a layer always has a bias.
    if cast("Tensor | None", layers[0].bias) is None:
        return None
    return torch.cat([layer.bias.detach() for layer in layers])


def _of_blocks(weight: BlockTensor, layers: Sequence[nn.Linear], form: str) -> nn.Module | None:
    """Layers in one kind of blocks, packed as they are stored; None where no kernel multiplies these."""
    problem = LinearProblem(
        weights=weight.kind.weights,
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        dtype="uint8",
        exact=form not in MOST_BITS,
        float32=form not in MOST_BITS,
    )
    verdicts = explain_linear(installed().linears, problem)
    if not verdicts or not verdicts[0].accepted:
        return None
    packed: nn.Module = verdicts[0].kernel.pack(weight.blocks, _bias_of(layers))
    return packed


def _side_by_side(packed: Sequence[nn.Module]) -> nn.Module:
    """Packed layers of one input as one: by a kernel that can, else one after another."""
    joined = (kernel.join(packed) for kernel in installed().linears)
    return next((whole for whole in joined if whole is not None), None) or SideBySide(packed)


def join_projections(model: Any) -> None:
    """Let linear layers of one input be one matrix, in the type that they have: queries, keys and values, and both
    inputs of a gate. Nothing else changes; afterwards the model can be run, but neither trained nor saved.

    Raises `WrongState` for a model that is packed already.
    """
    require_not_quantized(model, "the model's weights are packed already, as {}")
    dtype = next(model.parameters()).dtype

    def pack(layers: Sequence[nn.Linear], form: str = "") -> nn.Module:
        del form
        if len(layers) == 1:
            return layers[0]
        return linear_of(torch.cat([layer.weight.detach() for layer in layers]), _bias_of(layers))

    with torch.no_grad():
        for part in _packing_parts(model):
            if part is not model:
                part.pack(pack)
    model.quantization = str(dtype).removeprefix("torch.")


def require_not_quantized(model: Any, said: str) -> None:
    """Raises `WrongState`, saying how the model is packed where `said` has a pair of braces."""
    packed = getattr(model, "quantization", None)
    if packed is not None:
        raise WrongState(said.format(packed))


def can_quantize(model: Any) -> bool:
    """Whether anything of a model can be packed."""
    return hasattr(model, "unembedding") or bool(_packing_parts(model))


def _packing_parts(model: nn.Module) -> list[Any]:
    """The model itself, its parts and those of its blocks, where they have a method `pack`."""
    return [part for part in (model, *_parts(model, PARTS)) if hasattr(part, "pack")]


def _parts(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """What a model and its blocks call by these names."""
    blocks = [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]
    found = (getattr(holder, name, None) for holder in (model, *blocks) for name in names)
    return [part for part in found if isinstance(part, nn.Module)]


def _pack_rest(attention: nn.Module, pack: Pack) -> None:
    """Pack the linear layers left in an attention, each by itself; `quantize_model` says which of them stay."""
    for owner in list(attention.modules()):
        read = getattr(owner, "read_weights", ())
        for name, layer in list(owner.named_children()):
            wide = isinstance(layer, nn.Linear) and min(layer.in_features, layer.out_features) >= NARROWEST
            if wide and name not in read:
                setattr(owner, name, pack([cast("nn.Linear", layer)]))


def _join(model: Decoder) -> None:
    """Whole blocks as one step each, and all of them as one where one kernel can."""
    kernels = set()
    for block in cast("Sequence[Block]", model.blocks):
        parts = block.parts()
        kernel = None if parts is None else _kernel_of(parts)
        kernels.add(kernel)
        if parts is not None and kernel is not None:
            block.joined = kernel.build(parts)
    only = kernels.pop() if len(kernels) == 1 else None
    if only is not None:
        model.stack = only.stack([block.joined for block in cast("Sequence[Block]", model.blocks)])


def _kernel_of(parts: BlockParts) -> BlockKernel | None:
    """The kernel of least predicted cost that computes a block, if any does."""
    verdicts = explain(installed().blocks, block_problem(parts))
    return verdicts[0].kernel if verdicts and verdicts[0].accepted else None


def _convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """What was not packed, in the type that is computed with; packed weights are buffers and stay."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


log = logging.getLogger(__name__)


def prepack_model(model: Any, stored: torch.dtype) -> None:
    """Pack the weights of a model in the type that they are `stored` in, and compute in float32.

    Only a kernel that loses nothing is taken: one that widens weights to float32 and gives each row the same bits alone
    and in a crowd. Where there is none all weights become float32, unpacked, and a warning says why; so do those of a
    model of which nothing can be packed, unsaid.
    """
    if not can_quantize(model):
        widen_parameters(model)
        model.float()
        return
    form = dtype_name(str(stored).removeprefix("torch."))
    problem = LinearProblem(
        weights=form,
        inputs=model.config.hidden_size,
        outputs=model.config.vocab_size,
        dtype=form,
        exact=True,
        float32=True,
    )
    verdicts = explain_linear(installed().linears, problem)
    if verdicts and verdicts[0].accepted:
        quantize_model(model, form, kernel=verdicts[0].kernel.name)
        return
    widen_parameters(model)
    model.float()
    said = "; ".join(f"{verdict.kernel.name}: {', '.join(verdict.reasons)}" for verdict in verdicts)
    log.warning("weights are not packed, which is slower: %s", said or "the package attn-kernels-cpu is not installed")
