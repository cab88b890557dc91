"""Prepacking and quantizing the weights of a model for inference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from attn_core import installed
from attn_core.errors import Incompatible, InvalidValue, WrongState
from attn_core.kernels.block import BlockKernel, BlockParts, block_problem
from attn_core.kernels.dispatch import Verdict, explain
from attn_core.kernels.linear import (
    FP8_FORMATS,
    MOST_BITS,
    QUANTIZATIONS,
    STORED_FORMATS,
    WEIGHT_FORMATS,
    LinearKernel,
    LinearProblem,
    Pack,
    choose_linear,
    explain_linear,
    linear_problem,
)
from attn_core.states import dtype_name
from torch import Tensor, nn

from attn_models.decoder.block import Block
from attn_models.decoder.decoder import Decoder
from attn_models.quantization.block_tensor import BlockTensor, plain_matrix, same_blocks, widen_parameters
from attn_models.quantization.modules import SideBySide, StoredEmbedding, linear_of

log = logging.getLogger(__name__)

PARTS = ("attention", "cross", "feed_forward", "cell")
"""The attributes of a model and of its blocks whose modules may have a method `pack`."""

ATTENTIONS = ("attention", "cross")
"""The parts whose remaining linear layers are packed too, one by one."""

HEAD_IN_INT8 = ("int4", "fp8")
"""Formats with which the unembedding is kept as int8. For SmolLM2 in FP8 this increases the perplexity by at most a
sixth of what an unembedding in FP8, of the same size, does (benchmarks/results/fp8-weights-cpu.json, -bible.json)."""

MIN_FEATURES = 32
"""Linear layers of attentions with fewer inputs or outputs are not packed: gates, decays and low-rank factors, which
have few weights but affect whole heads."""


def quantize_model(
    model: Any, quantization: str, dtype: torch.dtype = torch.float32, kernel: str | None = None
) -> None:
    """Convert the weights of the model's linear layers to the format `quantization` in place, and compute in `dtype`.

    Packed are feed-forwards, the unembedding (a tied one too), attentions and cells that have a method `pack`; each
    layer by the cheapest installed `LinearKernel` that supports it, or by the one called `kernel`. Steps of whole
    blocks of a `Decoder` are computed by a `BlockKernel` if one supports them. Linear layers of an attention that its
    own `pack` leaves, or of an attention without one, are packed one by one, except narrow layers (`MIN_FEATURES`) and
    those whose matrices the attention also reads directly, which it names in `read_weights`. With `int4` and `fp8` the
    unembedding is kept as int8, as it is most sensitive to rounding. The embedding of a model with a `head` keeps its
    dtype; norms and other parameters become `dtype`. Weights that are stored in blocks (`BlockTensor`) stay so if a
    kernel multiplies them and they take no more bits than the format; floating-point formats then do not round inputs.
    Afterwards the model can be run, but neither trained nor saved.

    Raises `InvalidValue` for an unknown format, `KernelRefused` if no kernel can pack a layer, `WrongState` for a model
    that is packed already, `Incompatible` for one without any layer that can be packed.
    """
    require_not_quantized(model, "the model's weights are packed already, as {}")

    packing = Packing(dtype)

    def pack(layers: Sequence[nn.Linear], form: str = quantization) -> nn.Module:
        return _packed(layers, form, kernel if form == quantization else None, packing)

    if not can_quantize(model):
        raise Incompatible(f"no layer of a {type(model).__name__} can be packed; load it with quantization=none")
    with torch.no_grad():
        _pack_layers(model, pack)
        last = "int8" if quantization in HEAD_IN_INT8 else quantization
        if hasattr(model, "head"):
            model.head = pack([getattr(model, "unembedding", None) or linear_of(model.embedding.weight, None)], last)
            table = _embedding_table(model.embedding.weight, dtype)
            model.embedding, model.unembedding = StoredEmbedding(table, dtype), None
        elif hasattr(model, "unembedding"):
            model.unembedding = pack([model.unembedding], last)
        if isinstance(model, Decoder) and model.positions is not None:
            model.positions = StoredEmbedding(model.positions.weight, dtype)
        widen_parameters(model)
        _convert_parameters(model, dtype)
    if isinstance(model, Decoder):
        _fuse_blocks(model)
    packing.log_formats()
    model.quantization = quantization


def _pack_layers(model: Any, pack: Pack) -> None:
    """Pack the layers between the embedding and the unembedding."""
    for part in _packing_parts(model):
        part.pack(pack)
    for attention in _parts(model, ATTENTIONS):
        _pack_rest(attention, pack)


def _embedding_table(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The table of an embedding: on a CPU unchanged, on other devices dequantized if it is in blocks, as only the CPU
    dequantizes single rows."""
    if isinstance(table, BlockTensor) and table.blocks.device.type != "cpu":
        return table.plain().to(dtype)
    return table


@dataclass
class Packing:
    """The state while a model is packed: the `dtype` that it computes in, and messages about stored formats, which
    `log_formats` logs: `widened` has the new format and the reason for those that no kernel multiplies, `kept` remarks
    on others."""

    dtype: torch.dtype
    widened: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def log_formats(self) -> None:
        """Log one line for each stored format: a warning if it is not kept."""
        for form, remark in self.kept.items():
            log.info("weights stored as %s are kept in that format: %s", form, remark)
        for form, why in self.widened.items():
            log.warning("weights stored as %s are %s", form, why)


def _packed(layers: Sequence[nn.Linear], form: str, kernel: str | None, packing: Packing) -> nn.Module:
    """Layers that read the same input as one packed module; weights in blocks stay so if these take no more bits than
    `form`.

    With a floating-point format, inputs are only rounded to the dtype of the computation, even for weights in blocks.
    """
    kept = _pack_stored_blocks(layers, form, packing)
    if isinstance(kept, nn.Module):
        return kept
    if kept is MIXED_FORMATS:
        return _side_by_side([_packed([layer], form, kernel, packing) for layer in layers])
    weight = plain_matrix([layer.weight.detach() for layer in layers])
    problem = _problem(form, [weight], form, weight.dtype)
    packed: nn.Module = choose_linear(installed().linears, problem, kernel).pack(weight, _bias_of(layers))
    return packed


MIXED_FORMATS = "each layer by itself"
"""The result of `_pack_stored_blocks` for layers that are stored in different ways, some of them in blocks."""


def _pack_stored_blocks(layers: Sequence[nn.Linear], form: str, packing: Packing) -> nn.Module | str | None:
    """Layers that read the same input, packed in their stored blocks; `MIXED_FORMATS` if they are stored in different
    ways; None if none is in blocks of no more bits than `form`, or no kernel multiplies these blocks."""
    matrices, most = [layer.weight.detach() for layer in layers], MOST_BITS.get(form, 8)
    if not any(isinstance(one, BlockTensor) and STORED_FORMATS[one.kind.weights] <= most for one in matrices):
        return None
    kept = same_blocks(matrices, STORED_FORMATS, most)
    if kept:
        return _of_blocks(kept, layers, form, packing)
    return MIXED_FORMATS if len(layers) > 1 else None


def _problem(form: str, matrices: Sequence[Tensor], quantization: str, dtype: torch.dtype) -> LinearProblem:
    """The problem of multiplying with matrices [outputs, inputs] one below another; see `linear_problem`."""
    first = matrices[0]
    device = (first.blocks if isinstance(first, BlockTensor) else first).device.type
    sizes, name = (sum(matrix.shape[0] for matrix in matrices), first.shape[1]), str(dtype).removeprefix("torch.")
    return linear_problem(form, sizes, quantization=quantization, dtype=name, device=device)


def _bias_of(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The concatenated biases of layers, with zeros for layers without one; None if no layer has a bias."""
    # torch's stubs declare that a layer always has a bias.
    biases = [cast("Tensor | None", layer.bias) for layer in layers]
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    parts = zip(layers, biases, strict=True)
    return torch.cat([known.new_zeros(layer.out_features) if b is None else b.detach() for layer, b in parts])


def _of_blocks(
    matrices: Sequence[BlockTensor], layers: Sequence[nn.Linear], form: str, packing: Packing
) -> nn.Module | None:
    """Layers in one kind of blocks, packed as they are stored; None if no kernel multiplies these blocks."""
    stored = matrices[0].kind.weights
    problem = _problem(stored, matrices, form, packing.dtype)
    verdicts = explain_linear(installed().linears, problem)
    if not verdicts or not verdicts[0].accepted:
        packing.widened[stored] = f"dequantized and then packed as {form}: {refusals(verdicts, problem)}"
        return None
    if verdicts[0].remark is not None and stored in FP8_FORMATS:
        packing.kept[stored] = verdicts[0].remark
    kernel, blocks, bias = verdicts[0].kernel, [matrix.blocks for matrix in matrices], _bias_of(layers)
    packed: nn.Module | None = kernel.pack_rows(blocks, bias)
    return kernel.pack(torch.cat(blocks) if len(blocks) > 1 else blocks[0], bias) if packed is None else packed


def _side_by_side(packed: Sequence[nn.Module]) -> nn.Module:
    """Packed layers that read the same input as one module: joined by a kernel if one can, else a `SideBySide`."""
    joined = (kernel.join(packed) for kernel in installed().linears)
    return next((whole for whole in joined if whole is not None), None) or SideBySide(packed)


def join_projections(model: Any, dtype: torch.dtype | None = None) -> None:
    """Join linear layers that read the same input to one matrix, in their own dtype: queries, keys and values, with the
    gates and decays of recurrences, and the two input projections of a gated feed-forward.

    Weights that are stored in blocks (`BlockTensor`) stay so if a kernel multiplies them in `dtype`, by default that of
    the parameters; otherwise they become `dtype`, with a warning. Nothing else changes. Afterwards the model can be
    run, but neither trained nor saved. Raises `WrongState` for a model that is packed already.
    """
    require_not_quantized(model, "the model's weights are packed already, as {}")
    dtype = dtype or next(model.parameters()).dtype
    name, packing = str(dtype).removeprefix("torch."), Packing(dtype)

    def pack(layers: Sequence[nn.Linear], form: str = name) -> nn.Module:
        kept = _pack_stored_blocks(layers, form, packing)
        if isinstance(kept, nn.Module):
            return kept
        if kept is MIXED_FORMATS:
            return _side_by_side([pack([layer]) for layer in layers])
        matrices = [layer.weight.detach() for layer in layers]
        if len(layers) == 1 and not isinstance(matrices[0], BlockTensor):
            return layers[0]
        return linear_of(plain_matrix(matrices, dtype), _bias_of(layers))

    with torch.no_grad():
        if any(isinstance(parameter, BlockTensor) for parameter in model.parameters()):
            _pack_layers(model, pack)
            _keep_unembedding(model, pack)
            widen_parameters(model, dtype)
        else:
            for part in _parts(model, PARTS):
                join = getattr(part, "join", None) or getattr(part, "pack", None)
                if join is not None:
                    join(pack)
    packing.log_formats()
    model.quantization = name


def _keep_unembedding(model: Any, pack: Pack) -> None:
    """Pack an unembedding that is stored in blocks, a tied one too."""
    unembedding = getattr(model, "unembedding", None)
    if hasattr(model, "head"):
        layer = unembedding or linear_of(model.embedding.weight, None)
        if isinstance(layer.weight.detach(), BlockTensor):
            model.head, model.unembedding = pack([layer]), None
    elif unembedding is not None:
        model.unembedding = pack([unembedding])


def require_quantization(quantization: str | None, device: str) -> None:
    """Raise `InvalidValue` if `quantization` is not one of `QUANTIZATIONS`, or a format that no installed kernel
    supports on this type of device; called before any weights are read."""
    multiplied = {kernel.weights for kernel in installed().linears if device in kernel.devices}
    here = [name for name in QUANTIZATIONS if name not in WEIGHT_FORMATS or name in multiplied]
    if quantization is None or quantization in here:
        return
    if quantization not in QUANTIZATIONS:
        raise InvalidValue.of("quantization", quantization, ", ".join(QUANTIZATIONS))
    kernels = [kernel for kernel in installed().linears if kernel.weights == quantization]
    where = sorted({place for kernel in kernels for place in kernel.devices})
    elsewhere = f"supported on {' and '.join(where)} only" if where else "supported by no installed kernel"
    allowed = f"{', '.join(here)} on {device}; {quantization} is {elsewhere}"
    raise InvalidValue.of("quantization", quantization, allowed)


def require_not_quantized(model: Any, message: str) -> None:
    """Raise `WrongState` if the model is packed; the braces in `message` are replaced by the format."""
    packed = getattr(model, "quantization", None)
    if packed is not None:
        raise WrongState(message.format(packed))


def can_quantize(model: Any) -> bool:
    """Whether any layer of a model can be packed."""
    return hasattr(model, "unembedding") or bool(_packing_parts(model))


def _packing_parts(model: nn.Module) -> list[Any]:
    """Those of the model itself, its parts and the parts of its blocks that have a method `pack`."""
    return [part for part in (model, *_parts(model, PARTS)) if hasattr(part, "pack")]


def _parts(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules of a model and of its blocks that have one of these attribute names."""
    blocks = [block for child in model.children() if isinstance(child, nn.ModuleList) for block in child]
    found = (getattr(holder, name, None) for holder in (model, *blocks) for name in names)
    return [part for part in found if isinstance(part, nn.Module)]


def _pack_rest(attention: nn.Module, pack: Pack) -> None:
    """Pack the remaining linear layers of an attention one by one, except those listed in `quantize_model`."""
    for owner in list(attention.modules()):
        read = getattr(owner, "read_weights", ())
        for name, layer in list(owner.named_children()):
            large_enough = isinstance(layer, nn.Linear) and min(layer.in_features, layer.out_features) >= MIN_FEATURES
            if large_enough and name not in read:
                setattr(owner, name, pack([cast("nn.Linear", layer)]))


def _fuse_blocks(model: Decoder) -> None:
    """Fuse each block into one step if a kernel can, and all blocks into one stack if one kernel computes them all."""
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
    """The kernel with the lowest predicted cost that computes such a block; None if there is none."""
    verdicts = explain(installed().blocks, block_problem(parts))
    return verdicts[0].kernel if verdicts and verdicts[0].accepted else None


def _convert_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters, which were not packed, to `dtype`; packed weights are buffers and not converted."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def refusals(verdicts: Sequence[Verdict[LinearKernel]], problem: LinearProblem) -> str:
    """The reasons why no kernel multiplies weights of a format, as text."""
    reasons = "; ".join(f"{verdict.kernel.name}: {', '.join(verdict.reasons)}" for verdict in verdicts)
    if problem.device == "cpu":
        return reasons or "the package attn-kernels-cpu is not installed"
    remedy = "; with --dtype bfloat16 they may be kept in that format" if problem.float32 else ""
    return f"{reasons or f'no installed kernel supports them on {problem.device}'}{remedy}"


def prepack_model(model: Any, stored: torch.dtype) -> None:
    """Pack the weights of a model in the dtype that they are `stored` in, and compute in float32.

    Only a lossless and batch-invariant kernel is used: one that widens weights to float32, and whose result for a row
    does not depend on the other rows. If there is none, all weights become float32, unpacked, with a warning that gives
    the reason; a model without layers that can be packed becomes float32 without a warning.
    """
    if not can_quantize(model):
        widen_parameters(model)
        model.float()
        return
    form = dtype_name(str(stored).removeprefix("torch."))
    sizes, device = (model.config.vocab_size, model.config.hidden_size), next(model.parameters()).device.type
    problem = linear_problem(form, sizes, quantization="auto", dtype="float32", device=device)
    verdicts = explain_linear(installed().linears, problem)
    if verdicts and verdicts[0].accepted:
        quantize_model(model, form, kernel=verdicts[0].kernel.name)
        return
    widen_parameters(model)
    model.float()
    log.warning("weights are not packed, so inference is slower: %s", refusals(verdicts, problem))
