"""Causal language models that transformers builds and that keep more than keys and values, or whose attention is fixed.

transformers computes every step with a cache of its own. Between steps its tensors lie in the engine's cache: what
grows by a row with each token in pages, what has a fixed size in a slot of the request. Which tensors do is not read
but measured, from the caches of sequences of other lengths and numbers. In a step the caches of requests that compute
equally many tokens are put together, padded on the left, so that every row of them is copied once.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from attn_core import Paged, RaggedBatch
from attn_core.batch import ModelState, StaticBatch
from attn_core.errors import Incompatible, NotGraphSafe
from attn_core.states import Field, Slot, StateSpec
from attn_core.stores import ModelSpecs
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from attn_models.hf.causal import TransformersModel, rotary_positions

STATES = "transformers"
"""The name of the one layer whose states are those of transformers' cache."""
CACHES = ("past_key_values", "cache_params", "state")
"""How transformers calls the cache, as an argument and in outputs."""
MEASURED = 9
"""Tokens of the sequences whose caches are compared; not the width of any convolution, whose state would seem to
grow."""
WHOLE: dict[Any, Any] = {
    DynamicSlidingWindowLayer: DynamicLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: LinearAttentionAndFullAttentionLayer,
}
"""Layers of caches that keep all rows, for those that keep a window; masks hide what lies before the window."""


@dataclass(frozen=True)
class Way:
    """How requests are stepped together.

    `together`: requests of any length, "padded"; only those of one length, "equal"; or each "alone". `placed`: the
    model is given positions. `single`: the tokens of a chunk after a cached one pass one by one, where a class starts
    longer chunks from nothing.
    """

    together: str
    placed: bool
    single: bool

    def __str__(self) -> str:
        return self.together + (", token by token" if self.single else "")


WAYS = [
    Way(together, placed, single)
    for together in ("padded", "equal", "alone")
    for single in (False, True)
    for placed in (True, False)
]
"""All ways, the cheapest first."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of a cache: the dimension that counts sequences, and the one that counts tokens if it has a row each."""

    sequences: int
    tokens: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


LENGTH = object()
"""Stands for numbers of a cache that are the number of its tokens."""


def rebuilt(value: Any, replace: Callable[[str, Any], Any], path: str = "cache") -> Any:
    """A copy of a cache in which `replace(path, leaf)` stands for everything that is no container."""
    if isinstance(value, dict):
        return {key: rebuilt(each, replace, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(rebuilt(each, replace, f"{path}.{place}") for place, each in enumerate(value))
    kept = isinstance(value, (nn.Module, PreTrainedConfig, type, torch.dtype, torch.device))
    if kept or not type(value).__module__.startswith("transformers."):
        return replace(path, value)
    made = copy.copy(value)
    vars(made).update({name: rebuilt(each, replace, f"{path}.{name}") for name, each in vars(value).items()})
    return made


def leaves_of(cache: Any) -> dict[str, Any]:
    """Everything in a cache that is no container, by path."""
    found: dict[str, Any] = {}
    rebuilt(cache, found.__setitem__)
    return found


def kind_of(path: str, one: Any, longer: Any, more: Any) -> Leaf | object | None:
    """What a part of a cache is, from that of a sequence, of one with a token more, and of two: None for a constant.

    Raises `Incompatible` for one that grows otherwise.
    """
    if isinstance(one, Tensor) and isinstance(longer, Tensor) and isinstance(more, Tensor):
        sizes = list(zip(one.shape, longer.shape, more.shape, strict=True))
        by_sequence = [axis for axis, (a, _, c) in enumerate(sizes) if (a, c) == (1, 2)]
        by_token = [axis for axis, (a, b, c) in enumerate(sizes) if (a, b, c) == (MEASURED, MEASURED + 1, MEASURED)]
        others = [axis for axis, (a, b, c) in enumerate(sizes) if not a == b == c]
        if len(by_sequence) == 1 and len(by_token) < 2 and sorted(by_sequence + by_token) == others:
            tokens = by_token[0] if by_token else None
            shape = tuple(size for axis, size in enumerate(one.shape) if axis not in (*by_sequence, tokens))
            return Leaf(by_sequence[0], tokens, shape, one.dtype)
        if others:
            raise Incompatible(f"{path} of its cache grows otherwise than by a row with each token")
    values = [each.tolist() if isinstance(each, Tensor) else each for each in (one, longer, more)]
    if values[0] == values[1] == values[2]:
        return None
    if values in ([MEASURED, MEASURED + 1, MEASURED], [[MEASURED], [MEASURED + 1], [MEASURED]]):
        return LENGTH
    raise Incompatible(f"{path} of its cache is neither constant nor the number of tokens")


class OwnCache(TransformersModel):
    """A model of transformers that computes steps with a cache of its own, kept in the engine's cache between them.

    Raises `Incompatible`, with the reason, for a model without a cache, whose cache cannot be stored so, and as its
    base.
    """

    ways = WAYS
    way: Way = WAYS[0]

    def __init__(self, causal: Any) -> None:
        causal.set_attn_implementation("sdpa" if causal._supports_sdpa else "eager")  # noqa: SLF001 -- as AutoModel
        super().__init__(causal)

    def _prepare(self) -> None:
        self._takes = inspect.signature(self._body.forward).parameters
        named = [name for name in CACHES if name in self._takes]
        if not named or not self._takes.keys() & {"use_cache"}:
            raise Incompatible("it takes no cache")
        self._name, self._cache_type = named[0], None
        self._cache_type = type(self._measured(1, MEASURED))
        self._template = one = self._measured(1, MEASURED)
        leaves, others = (
            leaves_of(one),
            [leaves_of(self._measured(*more)) for more in ((1, MEASURED + 1), (2, MEASURED))],
        )
        if not all(leaves.keys() == each.keys() for each in others):
            raise Incompatible("its cache has other parts for other sequences")
        self._kinds = {path: kind_of(path, leaf, *(each[path] for each in others)) for path, leaf in leaves.items()}
        found = {path: kind for path, kind in self._kinds.items() if isinstance(kind, Leaf)}
        self._rows = {path: leaf for path, leaf in found.items() if leaf.tokens is not None}
        self._slots = {path: leaf for path, leaf in found.items() if leaf.tokens is None}
        if not found:
            raise Incompatible("it keeps no cache")

    @torch.inference_mode()
    def _measured(self, sequences: int, tokens: int) -> Any:
        ids = torch.arange(sequences * tokens, device=self.causal.device).view(sequences, tokens) % self.vocab_size
        return self._pass(ids, self._fresh(), {})[1]

    def _fresh(self) -> Any:
        """An empty cache; None where the model makes one of its own class."""
        if self._cache_type is not DynamicCache:
            return None
        cache = DynamicCache(config=self._body.config)
        cache.layers = [WHOLE[type(each)](**_states(each)) if type(each) in WHOLE else each for each in cache.layers]
        if any(cache.is_sliding):
            raise Incompatible("its cache keeps windows of a kind that is not known")
        return cache

    def _pass(self, ids: Tensor, cache: Any, places: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
        body, name = (self.text_model, "inputs_embeds") if ids.is_floating_point() else (self._body, "input_ids")
        given = {"use_cache": True, self._name: cache, **places}
        out = body(**{name: ids}, **{name: each for name, each in given.items() if name in self._takes})
        return self._hidden(out), getattr(out, self._name, None)

    def _inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a step computes: tokens [tokens], or embeddings [tokens, width] with rows of images, and the rotary
        positions [axes, tokens] of prompts with images.

        Raises `Incompatible` for tokens that see later ones, and for rows of several layers.
        """
        if self._placed is None:
            return tokens, None
        embedded, deeper = self._embedded(tokens, self._placed)
        if deeper or self._placed.seen is not None:
            raise Incompatible("images for several layers, or whose tokens see each other, need attn's attention")
        return embedded, self._placed.positions

    def state_specs(self) -> ModelSpecs:
        """The tensors of transformers' cache: rows of tokens, and states of fixed size."""

        def fields(leaves: Mapping[str, Leaf]) -> dict[str, Field]:
            types = {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in leaves.items()}
            own = {name: None if leaves[name].dtype == self.causal.dtype else dtype for name, dtype in types.items()}
            return {name: Field(leaf.shape, own[name]) for name, leaf in leaves.items()}

        states: dict[str, StateSpec] = {}
        if self._rows:
            states["rows"] = Paged(fields(self._rows))
        if self._slots:
            states["slots"] = Slot(fields(self._slots))
        return {STATES: states}

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        if isinstance(batch, StaticBatch):
            raise NotGraphSafe("models that transformers builds are not recorded")
        if batch.paths:
            raise Incompatible("a model with the cache of transformers computes no draft trees")
        views = state[STATES]
        slots = views["slots"].read() if self._slots else {}
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for request, (length, context) in enumerate(zip(batch.lengths, batch.contexts, strict=True)):
            padded = self.way.together == "padded" or not self._rows
            apart = request if self.way.together == "alone" else 0
            groups[length, min(context, 1) if padded else context, apart].append(request)
        inputs, own = self._inputs(tokens)
        spans, parts = list(batch.spans()), dict[int, tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]()
        for (length, *_), requests in groups.items():
            at = torch.stack(
                [torch.arange(spans[each].start, spans[each].stop, device=tokens.device) for each in requests]
            )
            positions = None if own is None else own[:, at]
            contexts = torch.tensor([batch.contexts[each] for each in requests], device=tokens.device)
            rows = views["rows"].rows(requests).fields if self._rows and batch.contexts[requests[0]] else {}
            kept = {name: each[requests] for name, each in slots.items()}
            hidden, cache = self._advanced(inputs[at], contexts, rows, kept, positions)
            made = leaves_of(cache)
            new = {
                path: made[path].movedim((leaf.sequences, leaf.tokens), (0, 1))[:, -length:]
                for path, leaf in self._rows.items()
            }
            kept = {path: made[path].movedim(leaf.sequences, 0) for path, leaf in self._slots.items()}
            parts |= {
                request: (hidden[place], _at(new, place), _at(kept, place)) for place, request in enumerate(requests)
            }
        ordered = [parts[request] for request in range(batch.requests)]
        if self._rows:
            views["rows"].append({path: torch.cat([rows[path] for _, rows, _ in ordered]) for path in self._rows})
        if self._slots:
            views["slots"].write({path: torch.stack([kept[path] for *_, kept in ordered]) for path in self._slots})
        return torch.cat([hidden for hidden, *_ in ordered])

    def _advanced(
        self,
        ids: Tensor,
        contexts: Tensor,
        rows: Mapping[str, Tensor],
        slots: Mapping[str, Tensor],
        positions: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """Hidden states [requests, tokens, width] of `ids` [requests, tokens], or embeddings [..., width], after
        `contexts` [requests] tokens whose cache is in `rows` and `slots`, and the cache after them; `positions` [axes,
        requests, tokens] are those of rotary embeddings, if they are others."""
        longest, hidden = int(contexts.max()), []
        padding = longest - contexts
        cache = self._restored(padding, longest, rows, slots) if longest else self._fresh()
        size = 1 if self.way.single and longest else ids.shape[1]
        for start in range(0, ids.shape[1], size):
            part = ids[:, start : start + size]
            places = {}
            if self._rows:
                keys = torch.arange(longest + start + part.shape[1], device=ids.device)
                places["attention_mask"] = (keys >= padding[:, None]).long()
                new = torch.arange(start, start + part.shape[1], device=ids.device)
                if self.way.placed:
                    places["position_ids"] = contexts[:, None] + new
                if positions is not None:
                    places["position_ids"] = rotary_positions(positions[..., new])
            made, cache = self._pass(part, cache, places)
            hidden.append(made)
        return torch.cat(hidden, 1), cache

    def _restored(self, padding: Tensor, longest: int, rows: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> Any:
        """A cache of `longest` tokens, of which each request has `padding` [requests] fewer, padded on the left."""
        places = (torch.arange(longest, device=padding.device) - padding[:, None]).clamp(min=0)
        requests = torch.arange(len(padding), device=padding.device)[:, None]

        def leaf(path: str, was: Any) -> Any:
            kind = self._kinds[path]
            if kind is LENGTH:
                return torch.full_like(was, longest) if isinstance(was, Tensor) else longest
            if not isinstance(kind, Leaf):
                return was
            if kind.tokens is None:
                return slots[path].movedim(0, kind.sequences)
            return rows[path][requests, places].movedim((0, 1), (kind.sequences, kind.tokens))

        return rebuilt(self._template, leaf)


def _at(fields: Mapping[str, Tensor], place: int) -> dict[str, Tensor]:
    return {name: each[place] for name, each in fields.items()}


def _states(layer: Any) -> dict[str, int]:
    return {"number_of_states": layer.number_of_states} if hasattr(layer, "number_of_states") else {}
