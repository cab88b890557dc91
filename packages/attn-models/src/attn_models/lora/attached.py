"""Attaches adapters to a model: hooks change the outputs of its linear layers, for each row by its own adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from attn_core.errors import Incompatible, InternalError
from attn_core.kernels.base import TRAINED_IN
from torch import Tensor, nn
from torch.nn import functional

from attn_models.attention import layer_attentions
from attn_models.decoder.decoder import Decoder
from attn_models.decoder.mixture_of_experts import MixtureOfExperts
from attn_models.lora.adapter import LoraAdapter
from attn_models.lora.sites import LoraSite, lora_sites
from attn_models.lora.tables import EMBEDDING, UNEMBEDDING, table_of
from attn_models.lora.together import AdaptedLinear, adapted

Rows: TypeAlias = Sequence[tuple[LoraAdapter | None, int]]
"""The adapters of the rows of a step: for each run of consecutive rows its adapter, if any, and its number of rows."""


@dataclass(frozen=True, eq=False)
class _Use:
    """The adapters in use with the indices of their rows (None for all rows), and the number of rows of the step."""

    parts: Sequence[tuple[LoraAdapter, Tensor | None]]
    count: int


class AdaptedModel:
    """A model whose linear layers can add the output of adapters, to each row that of its own adapter.

    The model's layers, weights and names are not changed. Adapters only act inside `using` or `stepping`, in the same
    thread, or after `always`, and no longer after `detach`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.sites = lora_sites(model)
        self.mixes = _mixes(model)
        """Whether rows of several adapters can be computed in one step; otherwise each needs a step of its own."""
        self._current = threading.local()
        self._always: _Use | None = None
        by_module: dict[nn.Module, list[LoraSite]] = {}
        for site in sorted(self.sites.values(), key=lambda site: site.start):
            by_module.setdefault(site.module, []).append(site)
        self._hooks = [
            module.register_forward_hook(partial(self._changed, sites)) for module, sites in by_module.items()
        ]
        self._site_of = {module: sites[0] for module, sites in by_module.items() if len(sites) == 1}
        self._joined = [module for module in model.modules() if hasattr(module, "joins")]
        for module in self._joined:
            module.joins = self._together
        self._tables = isinstance(model, Decoder)
        if self._tables:
            self._hooks.append(model.embedding.register_forward_hook(self._embedded))
            model.adapted_unembedding = self._unembedding
        self._read = [site for site in self.sites.values() if _is_read(model, site.name)]
        for site in self._read:
            site.module.adapted_weight = partial(self._weight, site)  # type: ignore[assignment]

    def detach(self) -> None:
        """Remove all hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        if self._tables:
            self.model.adapted_unembedding = None
        for module in self._joined:
            module.joins = None
        for site in self._read:
            del site.module.adapted_weight

    def always(self, adapter: LoraAdapter | None) -> None:
        """Use an adapter for all rows outside of `using`, as training does; None turns this off again."""
        self._always = None if adapter is None else _Use([(adapter, None)], 0)

    @contextmanager
    def using(self, rows: Rows) -> Iterator[None]:
        """A context in which, in this thread, rows [tokens, ...] use the given adapters; whole sequences [batch,
        tokens, ...] may use one adapter.

        Raises `Incompatible` for several adapters in a model that does not support them (`mixes`).
        """
        before = getattr(self._current, "use", None)
        self._current.use = self._use(rows)
        try:
            yield
        finally:
            self._current.use = before

    @contextmanager
    def stepping(self, rows: Rows) -> Iterator[None]:
        """Like `using`, for a step of the model; also disables fused kernels of whole blocks if any row has an adapter.

        Only one thread may step a model.
        """
        with self.using(rows):
            apart = self._take_apart() if self._current.use is not None else None
            try:
                yield
            finally:
                if apart is not None:
                    apart()

    @contextmanager
    def without(self) -> Iterator[None]:
        """A context in which the adapter of `always` is not used."""
        always, self._always = self._always, None
        try:
            yield
        finally:
            self._always = always

    def _use(self, rows: Rows) -> _Use | None:
        adapters = list(dict.fromkeys(adapter for adapter, _ in rows))
        if adapters in ([], [None]):
            return None
        if len(adapters) == 1:
            return _Use([(cast("LoraAdapter", adapters[0]), None)], 0)
        if not self.mixes or any(adapter is not None and len(adapter.tables) for adapter in adapters):
            raise Incompatible("several adapters in one step are not supported by this model")
        places: dict[LoraAdapter, list[int]] = {}
        start = 0
        for adapter, count in rows:
            if adapter is not None:
                places.setdefault(adapter, []).extend(range(start, start + count))
            start += count
        device = next(self.model.parameters()).device
        return _Use([(one, torch.tensor(found, device=device)) for one, found in places.items()], start)

    def _take_apart(self) -> Any:
        """Disable the model's fused kernels of whole blocks, which ignore adapters; returns a function that undoes it.

        Returns None for a model without such kernels.
        """
        if not isinstance(self.model, Decoder):
            return None
        model, blocks = self.model, cast("Sequence[Any]", self.model.blocks)
        stack, joined = model.stack, [block.joined for block in blocks]
        model.take_apart()

        def undo() -> None:
            model.stack = stack
            for block, kernel in zip(blocks, joined, strict=True):
                block.joined = kernel

        return undo

    def _in_use(self) -> _Use | None:
        return getattr(self._current, "use", None) or self._always

    def _changed(self, sites: Sequence[LoraSite], module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Any:
        del module
        use = self._in_use()
        if use is None:
            return None
        rows = given[0]
        for adapter, places in use.parts:
            out = _added(adapter, sites, rows, out, None if places is None else (places, use.count))
        return out

    def _together(self, rows: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
        """See `attn_core.joint.Joins`: layers and their adapter in a training step in float32 on a CPU."""
        use = self._in_use()
        if torch.compiler.is_compiling() or use is None or TRAINED_IN.get() != "float32":
            return None
        adapter, places = use.parts[0]
        if places is not None:
            return None
        parts = [part for layer in layers if (part := self._adapted(layer, adapter)) is not None]
        return adapted(rows, parts) if len(parts) == len(layers) else None

    def _adapted(self, layer: Any, adapter: LoraAdapter) -> AdaptedLinear | None:
        """A layer and its low-rank term; None if it is no plain one, or if something else is added, too."""
        site = self._site_of.get(layer) if type(layer) is nn.Linear else None
        found = None if site is None else adapter.of(site.name)
        if found is None or found.magnitude is not None or (found.dropout and found.training):
            return None
        return AdaptedLinear(layer.weight, layer.bias, found.a, found.b, found.scaling)

    def _table(self, name: str) -> Tensor | None:
        """The table [vocab_size, width] as the adapter in use changes it; None if it does not."""
        use = self._in_use()
        if use is None or name not in (adapter := use.parts[0][0]).tables:
            return None
        return adapter.table(name).over(table_of(self.model, name))

    def _embedded(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        del module
        table = self._table(EMBEDDING)
        return None if table is None else functional.embedding(given[0], table).to(out.dtype)

    def _unembedding(self) -> Tensor | None:
        return self._table(UNEMBEDDING)

    def _weight(self, site: LoraSite) -> Tensor:
        use = self._in_use()
        layer = None if use is None else use.parts[0][0].of(site.name)
        weight = cast("nn.Linear", site.module).weight
        return weight if layer is None else layer.merged(site).to(weight.dtype)


def _added(
    adapter: LoraAdapter, sites: Sequence[LoraSite], rows: Tensor, out: Tensor, mixed: tuple[Tensor, int] | None
) -> Tensor:
    """The output [..., outputs] of a module plus that of its adapter layers, for all rows or for those in `mixed`: the
    indices of the adapter's rows, and the number of rows of the step."""
    layers = [(site, layer) for site in sites if (layer := adapter.of(site.name)) is not None]
    if not layers:
        return out
    if mixed is None:
        return out + _side_by_side(layers, rows, out)
    places, count = mixed
    flat, into = rows.reshape(-1, rows.shape[-1]), out.reshape(-1, out.shape[-1])
    if len(flat) != count:
        raise InternalError(f"{sites[0].name} got {len(flat)} rows in a step of {count}: their adapters are not known")
    change = _side_by_side(layers, flat[places], into[places])
    return into.index_add(0, places, change).view_as(out)


def _side_by_side(layers: Sequence[tuple[LoraSite, Any]], rows: Tensor, out: Tensor) -> Tensor:
    """The term [..., all outputs of the module] to add to its output, from adapter layers ordered by their first
    output; zero for outputs without an adapter layer."""
    parts, end = [], 0
    for site, layer in layers:
        if site.start > end:
            parts.append(out.new_zeros(*out.shape[:-1], site.start - end))
        end = site.start + site.outputs
        parts.append(layer.change(rows, out[..., site.start : end], site))
    if end < out.shape[-1]:
        parts.append(out.new_zeros(*out.shape[:-1], out.shape[-1] - end))
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _is_read(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    return leaf in getattr(model.get_submodule(owner), "read_weights", ()) if owner else False


def _mixes(model: Any) -> bool:
    """Whether the input of every linear layer in a step has exactly the rows of the step.

    This holds for attention that is declared as a spec, and for dense feed-forwards. Experts get only some of the rows;
    inner modules and mechanisms with their own layers may get the rows of one request.
    """
    if not isinstance(model, Decoder):
        return False
    declared = all(found.mechanism.spec(found.config) is not None for found in layer_attentions(model.config))
    return declared and all(
        block.incremental
        and getattr(block.attention, "inner", None) is None
        and not isinstance(block.feed_forward, MixtureOfExperts)
        for block in cast("Sequence[Any]", model.blocks)
    )
