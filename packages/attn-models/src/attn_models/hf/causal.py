"""Causal language models that transformers builds, with attn's attention and caches inside: any family it knows.

transformers computes everything but attention. Its attention functions are exchanged for `attention`, which in a step
of the engine appends the keys and values of the new tokens of all requests to the cache, and attends by attn's kernels.
What a model does besides is not read but tried: `Attentions.recorded` asks one pass which attention it computes, and
`require_same_logits` compares steps of chunks and batches with transformers' own eager attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from attn_core import AttentionSpec, Causal, Heads, MechanismConfig, Paged, RaggedBatch, Window, installed
from attn_core.batch import ModelState, StaticBatch
from attn_core.distributions import Softmax, SoftmaxWithSink
from attn_core.errors import CheckpointInvalid, Incompatible, NotGraphSafe
from attn_core.kernels.linear import Pack
from attn_core.modifiers import SoftCap
from attn_core.scores import ScaledDot
from attn_core.states import Field
from attn_core.stores import ModelSpecs, StoreSize
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig
from transformers.masking_utils import eager_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from attn_models.adapters.registry import ADVICE
from attn_models.adapters.state_dict import stored_type
from attn_models.quantization.quantize import prepack_model, quantize_model
from attn_models.tokenizers.vocabulary import LibraryErrors
from attn_models.weights import CheckpointFolder

NAME = "attn_step"
"""The name under which transformers knows `attention`."""
SINKS = "distribution.logit"
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Kinds of rotary positions that differ with the length of the longest sequence of a batch."""
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
    """One pass of a model over the tokens of a batch; without a `batch`, its attention is only recorded."""

    layers: list[GivenAttention] = field(default_factory=list)
    batch: RaggedBatch | None = None
    state: ModelState | None = None
    calls: int = 0


STEP: ContextVar[Step | None] = ContextVar("step", default=None)
GIVEN: ContextVar[Tensor | None] = ContextVar("given", default=None)
MAPS: ContextVar[list[Tensor] | None] = ContextVar("maps", default=None)


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
    state = (step.state or {})[_name(place)]
    return step.layers[place].step((query, key, value), given.get("s_aux"), step.batch, state), None


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
    if not isinstance(rule, MaskRule) or not getattr(module, "is_causal", True):
        raise Incompatible(f"{type(module).__name__} is not causal self-attention")
    if key.shape[2] != query.shape[2]:
        raise Incompatible(f"{type(module).__name__} attends to other tokens than those of the text")
    heads = Heads(query=query.shape[1], key_value=key.shape[1], key_size=query.shape[3], value_size=value.shape[3])
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return GivenAttention(heads, scale, given, rule.window())


def _name(place: int) -> str:
    return f"attention.{place}"


def context_of(config: Any) -> int:
    """The longest sequence of a config of transformers, 0 if it does not say."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 0)


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
    """A causal language model of transformers as an `attn_core.models.LanguageModel`.

    Raises `Incompatible`, with the reason, for a model whose attention cannot be exchanged, that keeps other states
    between tokens, or whose steps give other logits than transformers.
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        text = causal.config.get_text_config()
        rope = str(getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None))
        if any(f"'{kind}'" in rope for kind in LENGTH_DEPENDENT):
            raise Incompatible("its rotary positions depend on the longest sequence of a batch")
        self.causal = causal
        self._attentions: list[GivenAttention] = []
        self._body = self._intercepted(text)
        head = causal.get_output_embeddings()
        self.vocab_size = int(text.vocab_size if head is None else head.weight.shape[0])
        self.max_seq_len = context_of(text)
        if not self.max_seq_len:
            raise Incompatible("its config does not say how long a sequence may be (max_position_embeddings)")
        self.config = TransformersConfig(
            hf=causal.config,
            vocab_size=self.vocab_size,
            hidden_size=text.hidden_size,
            max_seq_len=self.max_seq_len,
            num_heads=text.num_attention_heads,
            family=text.model_type,
        )

    def _intercepted(self, text: Any) -> Any:
        """The module that computes hidden states, whose outputs `logits` gives; records the attention of a pass."""
        kept: list[Any] = []
        for body in dict.fromkeys((self.causal.base_model, self.causal.get_decoder())):
            own = body.forward

            def forward(*args: Any, _own: Any = own, _body: Any = body, **named: Any) -> Any:
                given = GIVEN.get()
                if given is not None and _body is self._body:
                    return self._output(last_hidden_state=given)
                out = _own(*args, **named)
                if not self._attentions and hasattr(out, "last_hidden_state"):
                    kept.append((_body, type(out)))
                return out

            body.forward = forward
        name, step = type(self.causal).__name__, Step()
        token = STEP.set(step)
        try:
            ids = torch.zeros(1, 2, dtype=torch.int64, device=self.causal.device)
            with torch.inference_mode(), LibraryErrors(lambda said: Incompatible(f"{name} cannot be stepped: {said}")):
                self.causal(input_ids=ids, use_cache=False, **_places(torch.arange(2, device=ids.device)))
        finally:
            STEP.reset(token)
        if not kept:
            raise Incompatible(f"{name} has no module that computes hidden states")
        if len(step.layers) < text.num_hidden_layers:
            counts = f"{len(step.layers)} of its {text.num_hidden_layers} layers"
            raise Incompatible(f"only {counts} call an attention that can be exchanged")
        self._attentions, (body, self._output) = step.layers, kept[-1]
        return body

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, tokens, vocabulary] of whole sequences [batch, tokens], all by transformers."""
        found: Tensor = self.causal(input_ids=tokens, use_cache=False).logits
        return found

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
        token = STEP.set(Step(self._attentions, batch, state))
        try:
            out = self._body(input_ids=tokens[None], use_cache=False, **_places(batch.positions))
        finally:
            STEP.reset(token)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, width], as the model's class computes them."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        token = GIVEN.set(hidden[None])
        try:
            found: Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        finally:
            GIVEN.reset(token)
        return found

    def pack(self, pack: Pack) -> None:
        """Pack each linear layer that transformers calls, except small ones, whose rows need no kernel."""
        for owner in list(self.causal.modules()):
            for name, layer in list(owner.named_children()):
                if type(layer) is nn.Linear and min(layer.in_features, layer.out_features) >= SMALLEST:
                    setattr(owner, name, pack([layer]))

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


SMALLEST = 32
"""The fewest inputs and outputs of linear layers that are packed."""
CHECKED = ((5, 1, 1), (3, 3, 2))
"""The lengths of the chunks of two sequences that are computed together to check a model."""


@torch.inference_mode()
def require_same_logits(model: TransformersModel) -> None:
    """Raise `Incompatible` unless chunks of two sequences in one cache give the logits of transformers."""
    parameter = next(model.parameters())
    dtype, device = parameter.dtype, parameter.device
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(model.vocab_size, (sum(chunks),), generator=draw).to(device) for chunks in CHECKED]
    size = StoreSize(tokens=64, requests=2, dtype=str(dtype).removeprefix("torch."), device=str(device))
    store, contexts, steps = installed().caches.get("contiguous").create(model.state_specs(), size), [0, 0], []
    for name, text in enumerate(texts):
        store.admit(name)
        store.reserve(name, len(text))
    for lengths in zip(*CHECKED, strict=True):
        batch = RaggedBatch.of(lengths, contexts, lambda numbers: torch.tensor(numbers, device=device))
        new = [text[at : at + n] for text, at, n in zip(texts, contexts, lengths, strict=True)]
        found = model.logits(model.step(torch.cat(new), batch, store.view(batch, [0, 1])))
        steps.append(torch.split(found, list(lengths)))
        contexts = [at + n for at, n in zip(contexts, lengths, strict=True)]
    bound = 4000 * torch.finfo(dtype).eps if dtype == torch.float32 else 0.1
    for text, parts in zip(texts, zip(*steps, strict=True), strict=True):
        wanted = model(text[None])[0].float()
        off = float((torch.cat(parts).float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        if not off < bound:
            raise Incompatible(f"it keeps more than keys and values: logits of steps are {off:.1e} off transformers'")


def class_of(folder: Path) -> tuple[Any, Any]:
    """transformers' config, and class of causal language models, for the config.json of a folder.

    Raises `CheckpointInvalid` for values that transformers refuses.
    """
    with LibraryErrors(lambda said: CheckpointInvalid.of(folder / "config.json", f"transformers says: {said}")):
        made = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(made)]
    return (made if found.config_class is type(made) else made.get_text_config()), found


def _require_supported(found: Any, config: Mapping[str, Any]) -> None:
    """Raise `Incompatible` for a class whose attention cannot be exchanged, and for quantized weights."""
    if not found.is_backend_compatible():
        raise Incompatible(f"the attention of transformers' {found.__name__} cannot be exchanged")
    if config.get("quantization_config") is not None:
        raise Incompatible("quantization_config: quantized weights are not read through transformers")


@contextmanager
def named_refusals(folder: Path, kind: object) -> Iterator[None]:
    """Name the folder, its model_type and the next step in every `Incompatible` error."""
    try:
        yield
    except Incompatible as error:
        rule = f"model_type {kind!r} has no layout here, and cannot run through transformers: {error.message}; {ADVICE}"
        raise Incompatible(f"{folder}: {rule}", field="model_type") from error


def empty_causal(folder: Path, config: Mapping[str, Any]) -> Any:
    """transformers' model of the config in a folder, without memory; raises as `load_causal` for the config."""
    made, found = class_of(folder)
    with named_refusals(folder, config.get("model_type")):
        _require_supported(found, config)
    with torch.device("meta"), LibraryErrors(lambda said: CheckpointInvalid.of(folder, f"transformers says: {said}")):
        return found._from_config(made)  # noqa: SLF001 -- AutoModel's own way


def load_causal(
    path: Path, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device, pack: Callable[[Any], object]
) -> TransformersModel:
    """The model of a folder, built and read by transformers, without code or pickles of the folder. `pack` may pack its
    weights, or change it otherwise.

    Raises `Incompatible` for models that cannot be computed so, `CheckpointInvalid` for missing tensors and for what
    transformers refuses.
    """
    made, found = class_of(path)
    with named_refusals(path, config.get("model_type")):
        _require_supported(found, config)
        safe = {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False}
        with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"transformers says: {said}")):
            causal, said = found.from_pretrained(
                path, config=made, dtype=dtype, attn_implementation=NAME, output_loading_info=True, **safe
            )
        wrong = sorted({*said["missing_keys"], *(str(name) for name in said["mismatched_keys"])})
        if wrong:
            raise CheckpointInvalid.of(path, f"tensors are missing or have other shapes: {', '.join(wrong[:5])}")
        model = TransformersModel(causal.to(device).eval())
        pack(model)
        with LibraryErrors(lambda said: Incompatible(f"{found.__name__} cannot be stepped: {said}")):
            require_same_logits(model)
    return model


UNFUSED = (None, "none", "auto", "float32", "bfloat16", "int8")
"""Quantizations of models that transformers builds: each linear layer by itself, the unembedding like the others."""


def load_through_transformers(
    checkpoint: CheckpointFolder, dtype: str, quantization: str | None, prepare: Callable[[Any], object] | None
) -> tuple[Any, int]:
    """The model of a family that only transformers knows, and its number of parameters; raises as `load_causal`."""
    if quantization not in UNFUSED:
        allowed = ", ".join(filter(None, UNFUSED))
        raise Incompatible(f"quantization {quantization!r}: a model that transformers builds takes {allowed}")
    device, counts = torch.device(checkpoint.tensors.device), []
    packs = quantization == "auto" and dtype == "float32" and device.type == "cpu"
    read_as = stored_type(checkpoint) if packs else getattr(torch, dtype)

    def pack(model: Any) -> None:
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
        if prepare is not None:
            prepare(model)
        if packs:
            prepack_model(model, read_as)
        elif quantization not in (None, "none", "auto"):
            quantize_model(model, quantization, getattr(torch, dtype))

    return load_causal(checkpoint.path, checkpoint.config, read_as, device, pack), counts[0]
