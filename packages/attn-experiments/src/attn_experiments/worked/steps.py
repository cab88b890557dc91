"""The computation of a layer in steps: projections, scores, mask, weights, states, and the output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from attn_cache import PagedCache
from attn_core import AttentionSpec, Capability, Mechanism, MechanismConfig, RaggedBatch, Slot
from attn_core.stores import StateStore, StoreSize
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
        Step(
            name=f"W {name}",
            says="learned, a row for each output",
            values=weight.detach().reshape(-1, weight.shape[-1]),
        )
        for name, weight in layer.named_parameters()
        if weight.ndim and weight.numel()
    ]
    with torch.no_grad():
        found = layer.intermediates(rows, source) if hasattr(layer, "intermediates") else None
        if found is not None:
            return given + softmax_steps(layer.spec, found)
        return given + other_steps(mechanism, config, layer, rows, source)


def softmax_steps(spec: AttentionSpec, found: Any) -> list[Step]:
    """The steps of the intermediate results (`SpecLayer.intermediates`) of a layer whose spec says everything."""
    steps = [Step(name="q", says="queries, x times W query transposed", values=found.query)]
    if found.key is not None:
        steps.append(Step(name="k", says="keys, x times W key transposed, as the score reads them", values=found.key))
    steps.append(Step(name="v", says="values, x times W value transposed", values=found.value))
    steps.append(Step(name="e", says=f"scores, {type(spec.score).__name__}", values=found.scores))
    if found.allowed is not None:
        says = f"mask, {spec.mask.kind}: {int(found.allowed[0].sum())} of {found.allowed[0].numel()} pairs"
        steps.append(Step(name="M", says=says, values=found.allowed))
    return [
        *steps,
        Step(name="α", says=f"weights, {type(spec.distribution).__name__} of each row of e", values=found.weights),
        Step(name="α v", says="weighted sums of the values", values=found.sums),
        Step(name="out", says="the heads side by side, times W output transposed", values=found.out),
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
