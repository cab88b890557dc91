"""Causal language models that transformers builds, with attn's attention and caches inside: any family it knows.

transformers computes everything but attention. Its attention functions are exchanged for `attention`, which in a step
of the engine appends the keys and values of the new tokens of all requests to the cache, and attends by attn's kernels.
What a model does besides is not read but tried: `Attentions.recorded` asks one pass which attention it computes, and
`require_same_logits` compares steps of chunks and batches with transformers' own eager attention.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from inspect import getsource
from typing import Any

import torch
from attn_core import AttentionSpec, Causal, Heads, MechanismConfig, Paged, RaggedBatch, Window, installed
from attn_core.batch import ModelState, StaticBatch
from attn_core.distributions import Softmax, SoftmaxWithSink
from attn_core.errors import Incompatible, NotGraphSafe
from attn_core.kernels.linear import Pack
from attn_core.models import PlacedRows
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot
from attn_core.states import Field
from attn_core.stores import ModelSpecs
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from attn_models.tokenizers.vocabulary import LibraryErrors

NAME = "attn_step"
"""The name under which transformers knows `attention`."""
SINKS = "distribution.logit"
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions that differ with the longest sequence of a batch, unless all have the first length."""
UNBOUNDED = 1 << 20
"""The longest sequence of a model whose states do not grow, if its config names none."""
REFUSED_ARGUMENTS = ("position_bias", "cache", "head_mask", "attention_bias", "block_indices", "is_cross_attention")
"""Arguments of attention functions that change what is computed and are not supported."""


@dataclass(frozen=True)
class MaskRule:
    """The rule of a mask, which transformers would fill a tensor with."""

    visible: Callable[..., Any]
    local_size: int | None

    def window(self) -> int | None:
        """How many tokens a query sees, itself included; None for all before it. Raises `Incompatible` for others."""
        reach = 2 * (self.local_size or 4) + 3
        keys, zero = torch.arange(reach), torch.tensor(0)
        found = [
            torch.as_tensor(self.visible(zero, zero, torch.tensor(query), keys)).expand(reach) for query in range(reach)
        ]
        for window in (None, self.local_size):
            least = [-1 if window is None else query - window for query in range(reach)]
            if all(torch.equal(seen, (keys <= q) & (keys > least[q])) for q, seen in enumerate(found)):
                return window
        raise Incompatible("its masks are neither causal nor windows of the last tokens")


@dataclass
class Step:
    """One pass of a model over the tokens of a batch; without a `batch`, its attention is only recorded. `seen` is that
    of `PlacedRows`."""

    layers: list[GivenAttention] = field(default_factory=list)
    batch: RaggedBatch | None = None
    state: ModelState | None = None
    calls: int = 0
    seen: Tensor | None = None


STEP: ContextVar[Step | None] = ContextVar("step", default=None)
GIVEN: ContextVar[Tensor | None] = ContextVar("given", default=None)
MAPS: ContextVar[list[Tensor] | None] = ContextVar("maps", default=None)
CAUGHT: ContextVar[dict[str, Any] | None] = ContextVar("caught", default=None)
"""Where the arguments of the first call of the text model are noted."""


class TextReachedError(Exception):
    """Ends a pass at the text model, whose arguments are noted."""


class GivenAttention:
    """The attention of one call within a pass, over queries, keys and values that the model computes."""

    def __init__(self, heads: Heads, scale: float, given: Mapping[str, Any], window: int | None) -> None:
        cap, sinks = given.get("softcap"), given.get("s_aux")
        spec = AttentionSpec(
            heads=heads,
            score=ScaledDot(scale=scale),
            modifiers=() if cap is None else (SoftCap(cap=cap),),
            mask=Causal() if window is None else Causal() & Window(left=window - 1),
            distribution=Softmax() if sinks is None else SoftmaxWithSink(),
        )
        config = MechanismConfig(
            hidden_size=heads.query * heads.key_size, num_heads=heads.query, num_kv_heads=heads.key_value
        )
        self.spec, self.scale, self.window = spec, scale, window
        with torch.device("meta"):
            self.layer: Any = installed().spec_layer(spec, config)
        self.layer.output = nn.Identity()
        rows = {"key": (heads.key_value, heads.key_size), "value": (heads.key_value, heads.value_size)}
        self.states = {"kv": Paged({name: Field(shape) for name, shape in rows.items()}, window=window)}

    def step(
        self, operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, batch: RaggedBatch, state: Any
    ) -> Tensor:
        """Outputs [1, tokens, heads, value_size] of queries, keys and values [1, heads, tokens, size]; `sinks` are the
        logits of attention sinks [heads], if it has any."""
        query, key, value = (rows[0].transpose(0, 1) for rows in operands)
        self.layer.project = lambda *_: (query, key, value)
        self.layer.part_weights = lambda: {} if sinks is None else {SINKS: sinks}
        out: Tensor = self.layer.step(query.flatten(-2), batch, state)
        return out.view(1, len(query), query.shape[1], value.shape[-1])

    def see_groups(self, out: Tensor, query: Tensor, seen: Tensor, batch: RaggedBatch, state: Any) -> Tensor:
        """The outputs of a `step`, [1, tokens, heads, value_size], with those of the tokens that see later ones,
        for queries [1, heads, tokens, size]; `seen` is that of `PlacedRows`.

        Raises `Incompatible` for attention with sinks.
        """
        if not isinstance(self.spec.distribution, Softmax):
            raise Incompatible("tokens that see later ones are not supported with attention sinks")
        caps = [each.cap for each in self.spec.modifiers if isinstance(each, SoftCap)]
        for span in batch.spans():
            rows = slice(span.start, span.stop)
            own, last = batch.positions[rows, None], seen[rows, None]
            if not bool((last > own).any()):
                continue
            cached = state["kv"].rows([span.request])
            keys, values = (cached.fields[name][0].transpose(0, 1) for name in ("key", "value"))
            at = cached.positions[0]
            visible = at <= last if self.window is None else (at <= last) & (at > own - self.window)
            if cached.key_padding_mask is not None:
                visible &= cached.key_padding_mask[0]
            groups = query.shape[1] // len(keys)
            keys, values = (each.repeat_interleave(groups, 0).to(query) for each in (keys, values))
            scores = query[0, :, rows] @ keys.transpose(1, 2) * self.scale
            for cap in caps:
                scores = cap * torch.tanh(scores / cap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(query)
            out[0, rows] = (weights @ values).transpose(0, 1)
        return out


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: of a step of the engine where one runs, else the model's own."""
    step = STEP.get()
    if step is None:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        own = {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, **given}
        out, weights = eager(module, query, key, value, attention_mask, **own)
        if (maps := MAPS.get()) is not None:
            maps.append(weights)
        return out, weights
    place, step.calls = step.calls, step.calls + 1
    if step.batch is None:
        step.layers.append(_recorded(module, (query, key, value), attention_mask, scaling, given))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    state, layer = (step.state or {})[_name(place)], step.layers[place]
    out = layer.step((query, key, value), given.get("s_aux"), step.batch, state)
    return (out if step.seen is None else layer.see_groups(out, query, step.seen, step.batch, state)), None


def mask(*arguments: Any, **named: Any) -> Any:
    """A mask function of transformers: the rule of a mask where a step runs, else the mask of eager attention."""
    if STEP.get() is None:
        return eager_mask(*arguments, **named)
    return MaskRule(named["mask_function"], named.get("local_size"))


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def _recorded(
    module: Any, operands: Sequence[Tensor], rule: Any, scaling: float | None, given: Mapping[str, Any]
) -> GivenAttention:
    query, key, value = operands
    refused = [name for name in REFUSED_ARGUMENTS if given.get(name) is not None]
    if refused:
        raise Incompatible(f"its attention takes {', '.join(refused)}, which is not supported")
    if not isinstance(rule, MaskRule):
        raise Incompatible(f"{type(module).__name__} is not causal self-attention")
    if key.shape[2] != query.shape[2]:
        raise Incompatible(f"{type(module).__name__} attends to other tokens than those of the text")
    heads = Heads(query=query.shape[1], key_value=key.shape[1], key_size=query.shape[3], value_size=value.shape[3])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return GivenAttention(heads, scale, given, rule.window())


def _name(place: int) -> str:
    return f"attention.{place}"


def context_of(config: Any) -> int:
    """The longest sequence of a config of transformers, 0 if it does not say.

    Where rotary positions depend on the longest sequence of a batch, the one up to which they do not.
    """
    text = config.get_text_config(decoder=True)
    found = [getattr(text, "max_position_embeddings", None) or 0]
    given = [getattr(text, name, None) or {} for name in ("rope_parameters", "rope_scaling")]
    for rope in [each for outer in given for each in (outer, *outer.values()) if isinstance(each, Mapping)]:
        if rope.get("rope_type", rope.get("type")) in LENGTH_DEPENDENT:
            first = rope.get("original_max_position_embeddings")
            found += [first or getattr(text, "original_max_position_embeddings", None) or found[0]]
    return int(min(found))


@dataclass(frozen=True)
class TransformersConfig:
    """The config of a model that transformers builds: that of transformers, and the sizes that attn reads."""

    hf: Any
    vocab_size: int
    hidden_size: int
    max_seq_len: int
    num_heads: int
    family: str


class TransformersModel(nn.Module):
    """A causal language model of transformers; how its steps are computed is its subclass's.

    Raises `Incompatible`, with the reason, for a model that does not say how long its sequences may be.
    """

    ways: Sequence[Any] = (None,)
    """How requests can be stepped together, and in `way` how they are."""
    way: Any = None
    embedding_size: int
    """Elements of the row of an image's token; only set for a model that takes images, by `TransformersImages`."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self._placed: PlacedRows | None = None
        text = causal.config.get_text_config(decoder=True)
        self.causal = causal
        self._body, self._output = self._intercepted()
        self._prepare()
        grows = any(isinstance(each, Paged) for states in self.state_specs().values() for each in states.values())
        self.max_seq_len = context_of(text) or (0 if grows else UNBOUNDED)
        if not self.max_seq_len:
            raise Incompatible("its config does not say how long a sequence may be (max_position_embeddings)")
        self.config = TransformersConfig(
            hf=causal.config,
            vocab_size=self.vocab_size,
            hidden_size=text.hidden_size,
            max_seq_len=self.max_seq_len,
            num_heads=getattr(text, "num_attention_heads", 1),
            family=text.model_type,
        )

    def _intercepted(self) -> tuple[Any, Any]:
        """The module that computes hidden states, whose outputs `logits` gives, and the class of these outputs.

        The model itself and None where the logits are not those of the last hidden states alone.
        """
        kept: list[Any] = []
        for body in dict.fromkeys((self.causal.base_model, self.causal.get_decoder())):
            vars(body).pop("forward", None)
            if body is self.causal:
                continue

            @wraps(body.forward)
            def forward(*args: Any, _own: Any = body.forward, _body: Any = body, **named: Any) -> Any:
                given, caught = GIVEN.get(), CAUGHT.get()
                if caught is not None and _body is self.text_model:
                    caught.update(named)
                    raise TextReachedError
                if isinstance(named.get("attention_mask"), MaskRule):
                    named["attention_mask"] = None  # the text model makes a rule of its own
                if given is not None and _body is self._body:
                    return self._output(last_hidden_state=given)
                out = _own(*args, **named)
                if not hasattr(self, "_body") and hasattr(out, "last_hidden_state"):
                    kept.append((_body, type(out), out.last_hidden_state[0]))
                return out

            body.forward = forward
        name = type(self.causal).__name__
        ids = torch.zeros(1, 2, dtype=torch.int64, device=self.causal.device)
        with torch.inference_mode(), LibraryErrors(lambda said: Incompatible(f"{name} cannot be stepped: {said}")):
            wanted = self._first_pass(ids).logits[0]
        self.vocab_size = int(wanted.shape[-1])
        if kept:
            self._body, self._output, hidden = kept[-1]
            with torch.inference_mode(), suppress(Incompatible), LibraryErrors(Incompatible):
                if torch.allclose(self.logits(hidden), wanted, rtol=1e-3, atol=1e-3):
                    return self._body, self._output
        return self.causal, None

    def _first_pass(self, ids: Tensor) -> Any:
        return self.causal(input_ids=ids)

    @property
    def text_model(self) -> Any:
        """The part that computes hidden states of embeddings; the model itself if it has no such part."""
        return self.causal.get_decoder()

    @contextmanager
    def placing(self, placed: PlacedRows) -> Iterator[None]:
        """A context in which steps use these rows as the embeddings of some of their tokens."""
        self._placed = placed
        try:
            yield
        finally:
            self._placed = None

    def _embedded(self, tokens: Tensor, placed: PlacedRows) -> tuple[Tensor, dict[str, Any]]:
        """Embeddings [tokens, width] with the given rows, and what the text model adds to some in its first layers."""
        rows = self.causal.get_input_embeddings()(tokens.index_fill(0, placed.places, 0))
        first, *deeper = torch.split(placed.rows.to(rows), rows.shape[-1], dim=-1)
        embedded = rows.index_copy(0, placed.places, first)
        if not deeper:
            return embedded, {}
        where = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, placed.places, 1)
        return embedded, {DEEPER: deeper, DEEPER_PLACES: where[None]}

    @abstractmethod
    def _prepare(self) -> None:
        """Find out what is kept between steps."""

    @abstractmethod
    def state_specs(self) -> ModelSpecs:
        """The states of a request between steps."""

    @abstractmethod
    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens], all by transformers."""
        found: Tensor = self.causal(input_ids=tokens, use_cache=False).logits
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, width], as the model's class computes them."""
        if self._output is None:
            return hidden
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        token = GIVEN.set(hidden[None])
        try:
            found: Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        finally:
            GIVEN.reset(token)
        return found

    def _hidden(self, out: Any) -> Tensor:
        hidden: Tensor = out.logits if self._output is None else out.last_hidden_state
        return hidden

    def pack(self, pack: Pack) -> None:
        """Pack each linear layer that transformers only calls, except small ones, whose rows need no kernel."""
        for owner in list(self.causal.modules()):
            for name, layer in list(owner.named_children()):
                large = type(layer) is nn.Linear and min(layer.in_features, layer.out_features) >= SMALLEST
                if large and not re.search(rf"\.{name}\.(weight|bias)\b", getsource(type(owner))):
                    setattr(owner, name, pack([layer]))


class ExchangedAttention(TransformersModel):
    """A model of transformers whose calls of attention are attn's, over the rows of the cache where they lie.

    Raises `Incompatible`, with the reason, for a model whose attention cannot be exchanged, and as its base.
    """

    def __init__(self, causal: Any) -> None:
        if not causal.is_backend_compatible():
            raise Incompatible("its class does not let attention be exchanged")
        causal.set_attn_implementation(NAME)
        self._recorded = Step()
        super().__init__(causal)

    def _prepare(self) -> None:
        self._attentions, layers = self._recorded.layers, self.causal.config.get_text_config().num_hidden_layers
        if len(self._attentions) < layers:
            counts = f"{len(self._attentions)} of its {layers} layers"
            raise Incompatible(f"only {counts} call an attention that can be exchanged")

    def _first_pass(self, ids: Tensor) -> Any:
        token = STEP.set(self._recorded)
        try:
            return self.causal(input_ids=ids, use_cache=False, **_places(torch.arange(2, device=ids.device)))
        finally:
            STEP.reset(token)

    def state_specs(self) -> ModelSpecs:
        """The states of each call of attention in a pass: keys and values of all tokens, or of a window."""
        return {_name(place): each.states for place, each in enumerate(self._attentions)}

    def layer_mechanisms(self) -> Mapping[str, str]:
        """Attention by scaled dot products in all layers."""
        return dict.fromkeys(self.state_specs(), "gqa")

    def step(self, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        """Hidden states [tokens, width] of the new tokens [tokens] of many requests."""
        if isinstance(batch, StaticBatch):
            raise NotGraphSafe("models that transformers builds are not recorded")
        placed, places = self._placed, _places(batch.positions)
        token = STEP.set(Step(self._attentions, batch, state, seen=None if placed is None else placed.seen))
        try:
            if placed is None:
                out = self._body(input_ids=tokens[None], use_cache=False, **places)
            else:
                embedded, given = self._embedded(tokens, placed)
                places |= (
                    {"position_ids": rotary_positions(placed.positions[:, None])}
                    if placed.positions is not None
                    else {}
                )
                out = self.text_model(inputs_embeds=embedded[None], use_cache=False, **places, **given)
        finally:
            STEP.reset(token)
        return self._hidden(out)[0]

    def attention_maps(self, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
        """Attention weights [heads, query, key] by layer of one sequence [tokens]."""
        maps: list[Tensor] = []
        token = MAPS.set(maps)
        try:
            self(tokens[None])
        finally:
            MAPS.reset(token)
        return {layer: maps[layer][0] for layer in layers}


def _places(positions: Tensor) -> dict[str, Tensor]:
    # With a mask of ones transformers does not look for several documents in the positions.
    return {"position_ids": positions[None], "attention_mask": torch.ones_like(positions)[None]}


def rotary_positions(positions: Tensor) -> Tensor:
    """`position_ids` of transformers, [batch, tokens] or [axes, batch, tokens], of positions [axes, batch, tokens]."""
    return positions[0] if len(positions) == 1 else positions


DEEPER, DEEPER_PLACES = "deepstack_visual_embeds", "visual_pos_masks"
"""Arguments of text models: what is added to the states of image tokens after each of the first layers, and where."""
SMALLEST = 32
"""The fewest inputs and outputs of linear layers that are packed."""
