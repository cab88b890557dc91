"""The computation of a layer in steps: projections, scores, mask, weights, states, and the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from attn_cache import PagedCache
from attn_core import Capability, Mechanism, MechanismConfig, RaggedBatch, Slot
from attn_core.stores import StateStore, StoreSize
from attn_variants.attention.layer import SpecLayer
from attn_variants.compute.distribution import distribute
from attn_variants.compute.modifiers import modify
from attn_variants.compute.plain import pairs_of, summed
from attn_variants.scores import scores
from torch import Tensor, nn

LAYER = "layer"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: its name, what is computed, and the values, [rows, columns] or [heads, rows, columns] (bool: masks)."""

    name: str
    says: str
    values: Tensor


def steps_of(
    mechanism: Mechanism, config: MechanismConfig, layer: Any, rows: Tensor, source: Tensor | None
) -> list[Step]:
    """The steps of a layer over `rows` and, where it attends to one, `source`, [tokens, hidden_size] each.

    Layers of a score, a mask and a distribution are computed from the printed values alone. Of others the steps are the
    outputs of their modules, the weights where there are any, the states of fixed size after each token, and the
    output. The last step is the output [tokens, hidden_size].
    """
    given = [Step(name="x", says="the inputs, a row for each token", values=rows)]
    if source is not None:
        given.append(Step(name="source", says="the rows that it attends to", values=source))
    given += [
        Step(name=f"W {name}", says="learned", values=weight.detach().reshape(-1, weight.shape[-1]))
        for name, weight in layer.named_parameters()
        if weight.ndim and weight.numel()
    ]
    with torch.no_grad():
        if isinstance(layer, SpecLayer) and layer.inner is None:
            return given + softmax_steps(layer, rows, source)
        return given + other_steps(mechanism, config, layer, rows, source)


def softmax_steps(layer: SpecLayer, rows: Tensor, source: Tensor | None) -> list[Step]:
    """Queries, keys, values, scores, mask, weights, weighted sums and output of a layer whose spec says everything."""
    spec, query = layer.spec, rows[None]
    if source is None:
        fields = layer.project_kv(query)
        projected = layer.project_rotated(query, layer.cos_sin_to(len(rows), query))
    else:
        fields = {name: field[None] for name, field in layer.encode(source)["source"].items()}
        projected = layer.project_query(query)
    pairs = pairs_of(spec, layer.operands(projected, fields, None, layer.positions(query, None)))
    energies = modify(pairs, scores(pairs))
    weights = distribute(pairs, energies)
    sums = summed(spec, pairs.operands, weights)
    found = [
        Step(name="q", says="queries, x W query", values=pairs.query[0]),
        Step(name="v", says="values, x W value", values=pairs.operands.value[0].transpose(0, 1)),
        Step(name="e", says=f"scores, {type(spec.score).__name__}", values=energies[0]),
    ]
    if pairs.operands.key.shape[-1]:
        found.insert(1, Step(name="k", says="keys, x W key, as the score reads them", values=pairs.key[0]))
    if pairs.allowed is not None:
        allowed = pairs.allowed.expand(1, -1, *energies.shape[-2:])[0]
        says = f"mask, {spec.mask.kind}: {int(allowed[0].sum())} of {allowed[0].numel()} pairs"
        found.append(Step(name="M", says=says, values=allowed))
    return [
        *found,
        Step(name="α", says=f"weights, {type(spec.distribution).__name__} of each row of e", values=weights[0]),
        Step(name="α v", says="weighted sums of the values", values=sums[0].transpose(0, 1)),
        Step(name="out", says="the heads side by side, times W output", values=layer.output(sums.flatten(-2))[0]),
    ]


def other_steps(
    mechanism: Mechanism, config: MechanismConfig, layer: Any, rows: Tensor, source: Tensor | None
) -> list[Step]:
    """The outputs of the modules of a layer in their order, weights, states after each token, and the output."""
    found: list[Step] = []
    given = (rows[None],) if source is None else (rows[None], source[None])
    with ExitStack() as hooks:
        for name, module in layer.named_modules():
            if name and not list(module.children()) and list(module.parameters(recurse=False)):
                hooks.callback(module.register_forward_hook(heard(found, name)).remove)
        out = layer(*given)[0]
    if mechanism.can(Capability.WEIGHTS):
        weights = layer.weights(*given)[0]
        found.append(Step(name="α", says="weights of each query (row) over the keys", values=weights))
    return [*found, *states(mechanism, config, layer, rows, source), Step(name="out", says="the output", values=out)]


def heard(found: list[Step], name: str) -> Any:
    """A forward hook that notes the output of the module of this name as a step."""

    def hook(_module: nn.Module, _given: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.is_floating_point() and out.numel():
            values = out.detach().reshape(-1, out.shape[-1])
            found.append(Step(name=name, says=f"what {name} gives", values=values))

    return hook


def states(
    mechanism: Mechanism, config: MechanismConfig, layer: Any, rows: Tensor, source: Tensor | None
) -> Iterator[Step]:
    """The states of fixed size after each token, and the outputs of the tokens one by one, of layers that have such."""
    specs = mechanism.state(config)
    fixed = {name: spec for name, spec in specs.items() if isinstance(spec, Slot)}
    if not fixed or not mechanism.can(Capability.INCREMENTAL):
        return
    store: StateStore = PagedCache().create(
        {LAYER: specs}, StoreSize(tokens=len(rows) + 1, requests=1, dtype="float64")
    )
    store.admit(0)
    if source is not None:
        store.write_source(0, {LAYER: layer.encode(source)})
    outputs = []
    for place, row in enumerate(rows):
        batch, after = (RaggedBatch.of([1], [done], torch.tensor) for done in (place, place + 1))
        store.reserve(0, place + 2)
        outputs.append(layer.step(row[None], batch, store.view(batch, [0])[LAYER]))
        view = store.view(after, [0])[LAYER]
        for name in fixed:
            for field, value in view[name].read().items():
                says = f"state after token {place}"
                yield Step(name=f"{name} {field}", says=says, values=value.reshape(-1, value.shape[-1]).clone())
    yield Step(name="step by step", says="the outputs, computed from the states", values=torch.cat(outputs))
