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
from attn_models.quantization.block_tensor import BlockTensor, blocks_of, plain_matrix, widen_parameters
from attn_models.quantization.modules import SideBySide, StoredEmbedding, linear_of

log = logging.getLogger(__name__)

PARTS = ("attention", "cross", "feed_forward", "cell")
"""What a model or a block of its calls the parts that may have a method `pack`."""

ATTENTIONS = ("attention", "cross")
"""Those of the parts whose further linear layers are packed, too, one by one."""

HEAD_IN_INT8 = ("int4", "fp8")
"""Formats beside which the unembedding is kept as int8. Of SmolLM2 in FP8 this costs a sixth at most of the perplexity
that an unembedding in FP8 does, of as many bytes (benchmarks/results/fp8-weights-cpu.json, -bible.json)."""

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
    apart from their products, which it names in `read_weights`. With `int4` and `fp8` the unembedding is kept as int8:
    it is where rounding hurts most. The embedding of a model with a `head` keeps the type it has; norms and what is not
    packed become `dtype`. Weights that are stored in blocks (`BlockTensor`) stay in these where a kernel multiplies
    them so and they take no more bits than the format; formats of floats then round no inputs. Afterwards the model
    can be run, but neither trained nor saved.

    Raises `InvalidValue` for an unknown format, `KernelRefused` where nobody can pack a layer, `WrongState` for a
    model that is packed already, `Incompatible` for one of which nothing can be packed.
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
            table = _looked_up(model.embedding.weight, dtype)
            model.embedding, model.unembedding = StoredEmbedding(table, dtype), None
        elif hasattr(model, "unembedding"):
            model.unembedding = pack([model.unembedding], last)
        if isinstance(model, Decoder) and model.positions is not None:
            model.positions = StoredEmbedding(model.positions.weight, dtype)
        widen_parameters(model)
        _convert_parameters(model, dtype)
    if isinstance(model, Decoder):
        _join(model)
    packing.say()
    model.quantization = quantization


def _pack_layers(model: Any, pack: Pack) -> None:
    """Pack what lies between the embedding and the unembedding."""
    for part in _packing_parts(model):
        part.pack(pack)
    for attention in _parts(model, ATTENTIONS):
        _pack_rest(attention, pack)


def _looked_up(table: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of an embedding as they are kept: in blocks on a CPU alone, whose rows the host takes apart."""
    if isinstance(table, BlockTensor) and table.blocks.device.type != "cpu":
        return table.plain().to(dtype)
    return table


@dataclass
class Packing:
    """What holds for all layers of a model while it is packed: the `dtype` that it computes in; and of stored formats,
    which `say` logs once each, what became of those that no kernel multiplies and why, and what is worth knowing of
    those that stay."""

    dtype: torch.dtype
    widened: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)

    def say(self) -> None:
        """One line for each format, a warning where it does not stay."""
        for form, remark in self.kept.items():
            log.info("weights stored as %s stay so: %s", form, remark)
        for form, why in self.widened.items():
            log.warning("weights stored as %s are %s", form, why)


def _packed(layers: Sequence[nn.Linear], form: str, kernel: str | None, packing: Packing) -> nn.Module:
    """Layers of one input as one; those that are stored in blocks stay so where these take no more bits than `form`.

    A format of floats rounds inputs to the type that is computed in and no further, whatever blocks weights are in.
    """
    kept = _kept(layers, form, packing)
    if isinstance(kept, nn.Module):
        return kept
    if kept is APART:
        return _side_by_side([_packed([layer], form, kernel, packing) for layer in layers])
    weight = plain_matrix([layer.weight.detach() for layer in layers])
    problem = _problem(form, weight, form, weight.dtype)
    packed: nn.Module = choose_linear(installed().linears, problem, kernel).pack(weight, _bias_of(layers))
    return packed


APART = "each layer by itself"
"""What `_kept` says of layers of which some stay in blocks."""


def _kept(layers: Sequence[nn.Linear], form: str, packing: Packing) -> nn.Module | str | None:
    """Layers of one input as they are stored, packed; `APART` where they are stored in several ways, None where none
    is in blocks of no more bits than `form` or no kernel multiplies these."""
    matrices, most = [layer.weight.detach() for layer in layers], MOST_BITS.get(form, 8)
    if not any(isinstance(one, BlockTensor) and STORED_FORMATS[one.kind.weights] <= most for one in matrices):
        return None
    kept = blocks_of(matrices, STORED_FORMATS, most)
    if kept is not None:
        return _of_blocks(kept, layers, form, packing)
    return APART if len(layers) > 1 else None


def _problem(form: str, weight: Tensor, quantization: str, dtype: torch.dtype) -> LinearProblem:
    """What is asked of a matrix [outputs, inputs]; see `linear_problem`."""
    device = (weight.blocks if isinstance(weight, BlockTensor) else weight).device.type
    sizes, name = (weight.shape[0], weight.shape[1]), str(dtype).removeprefix("torch.")
    return linear_problem(form, sizes, quantization=quantization, dtype=name, device=device)


def _bias_of(layers: Sequence[nn.Linear]) -> Tensor | None:
    """The biases of layers side by side, zeros for those without; None where none has any."""
    # torch's stubs say that a layer always has a bias.
    biases = [cast("Tensor | None", layer.bias) for layer in layers]
    known = next((bias for bias in biases if bias is not None), None)
    if known is None:
        return None
    parts = zip(layers, biases, strict=True)
    return torch.cat([known.new_zeros(layer.out_features) if b is None else b.detach() for layer, b in parts])


def _of_blocks(weight: BlockTensor, layers: Sequence[nn.Linear], form: str, packing: Packing) -> nn.Module | None:
    """Layers in one kind of blocks, packed as they are stored; None where no kernel multiplies these."""
    stored = weight.kind.weights
    problem = _problem(stored, weight, form, packing.dtype)
    verdicts = explain_linear(installed().linears, problem)
    if not verdicts or not verdicts[0].accepted:
        packing.widened[stored] = f"read as numbers and then kept as {form}: {refusals(verdicts, problem)}"
        return None
    if verdicts[0].remark is not None and stored in FP8_FORMATS:
        packing.kept[stored] = verdicts[0].remark
    packed: nn.Module = verdicts[0].kernel.pack(weight.blocks, _bias_of(layers))
    return packed


def _side_by_side(packed: Sequence[nn.Module]) -> nn.Module:
    """Packed layers of one input as one: by a kernel that can, else one after another."""
    joined = (kernel.join(packed) for kernel in installed().linears)
    return next((whole for whole in joined if whole is not None), None) or SideBySide(packed)


def join_projections(model: Any, dtype: torch.dtype | None = None) -> None:
    """Let linear layers of one input be one matrix, in the type that they have: queries, keys and values, beside them
    the gates and decays of recurrences, and both inputs of a feed-forward's gate. Weights that are stored in blocks
    (`BlockTensor`) stay in these where a kernel multiplies them so in `dtype`, by default the parameters' own; else
    they become `dtype`, which a warning says. Nothing else changes; afterwards the model can be run, but neither
    trained nor saved.

    Raises `WrongState` for a model that is packed already.
    """
    require_not_quantized(model, "the model's weights are packed already, as {}")
    dtype = dtype or next(model.parameters()).dtype
    name, packing = str(dtype).removeprefix("torch."), Packing(dtype)

    def pack(layers: Sequence[nn.Linear], form: str = name) -> nn.Module:
        kept = _kept(layers, form, packing)
        if isinstance(kept, nn.Module):
            return kept
        if kept is APART:
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
    packing.say()
    model.quantization = name


def _keep_unembedding(model: Any, pack: Pack) -> None:
    """An unembedding that is stored in blocks, a tied one too, as `pack` keeps it."""
    unembedding = getattr(model, "unembedding", None)
    if hasattr(model, "head"):
        layer = unembedding or linear_of(model.embedding.weight, None)
        if isinstance(layer.weight.detach(), BlockTensor):
            model.head, model.unembedding = pack([layer]), None
    elif unembedding is not None:
        model.unembedding = pack([unembedding])


def require_quantization(quantization: str | None, device: str) -> None:
    """Raises `InvalidValue` for what is none of `QUANTIZATIONS`, and for a format that no installed kernel multiplies
    on a type of device, before anything is read."""
    multiplied = {kernel.weights for kernel in installed().linears if device in kernel.devices}
    here = [name for name in QUANTIZATIONS if name not in WEIGHT_FORMATS or name in multiplied]
    if quantization is None or quantization in here:
        return
    if quantization not in QUANTIZATIONS:
        raise InvalidValue.of("quantization", quantization, ", ".join(QUANTIZATIONS))
    kernels = [kernel for kernel in installed().linears if kernel.weights == quantization]
    where = sorted({place for kernel in kernels for place in kernel.devices})
    elsewhere = f"multiplied on {' and '.join(where)} alone" if where else "multiplied by no kernel that is installed"
    allowed = f"{', '.join(here)} on {device}; {quantization} is {elsewhere}"
    raise InvalidValue.of("quantization", quantization, allowed)


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


def refusals(verdicts: Sequence[Verdict[LinearKernel]], problem: LinearProblem) -> str:
    """Why nobody multiplies weights of a format, in words."""
    said = "; ".join(f"{verdict.kernel.name}: {', '.join(verdict.reasons)}" for verdict in verdicts)
    if problem.device == "cpu":
        return said or "the package attn-kernels-cpu is not installed"
    remedy = "; --dtype bfloat16 may keep them as they are" if problem.float32 else ""
    return f"{said or f'no kernel is installed that multiplies them on {problem.device}'}{remedy}"


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
    sizes, device = (model.config.vocab_size, model.config.hidden_size), next(model.parameters()).device.type
    problem = linear_problem(form, sizes, quantization="auto", dtype="float32", device=device)
    verdicts = explain_linear(installed().linears, problem)
    if verdicts and verdicts[0].accepted:
        quantize_model(model, form, kernel=verdicts[0].kernel.name)
        return
    widen_parameters(model)
    model.float()
    log.warning("weights are not packed, which is slower: %s", refusals(verdicts, problem))
