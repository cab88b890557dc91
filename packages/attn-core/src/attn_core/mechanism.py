"""The `Mechanism` base class: what a plugin implements so that its attention is listed, costed, trained and served."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.batch import Fields, LayerState, RaggedBatch
from attn_core.computation import Computation
from attn_core.config import MechanismConfig, check_config_type
from attn_core.cost import Cost, Shape, Step
from attn_core.display import sketch_card
from attn_core.errors import Incompatible, InvalidValue, MechanismInvalid, Undeclared
from attn_core.state_faults import described
from attn_core.states import Field, Paged, StateSpecs

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.kernels.recurrence import RecurrenceSpec
    from attn_core.kernels.recurrent_step import RecurrentStepSpec
    from attn_core.spec import AttentionSpec
else:
    Tensor = Any


class Capability(StrEnum):
    """An ability that a mechanism declares. The laws of `attn_testing` test each declared ability."""

    CAUSAL = "causal"
    """A mode: no output depends on a later input when configured causal."""
    BIDIRECTIONAL = "bidirectional"
    """A mode: every output may depend on every input when configured not causal."""
    CROSS = "cross"
    """A mode: queries attend to a source, not to their own sequence, when configured cross."""
    INCREMENTAL = "incremental"
    """Has its own `step`; without it the engine replays the full sequence."""
    EXACT = "exact"
    """Computes its equation exactly, without sampling or approximation."""
    WEIGHTS = "weights"
    """Returns attention weights on request."""
    NORMALISED = "normalised"
    """Weights are not negative and sum to one over the allowed keys, unless an option replaces the distribution."""
    PADDING = "padding"
    """Accepts a key padding mask."""
    ROTARY = "rotary"
    """Supports rotary positions."""
    GROUPED = "grouped"
    """Supports fewer key/value heads than query heads."""
    BIAS = "bias"
    """Adds biases to its projections where it is configured to."""
    HEAD_DIM = "head_dim"
    """Supports a head size other than `hidden_size / num_heads`."""
    CHOOSES = "chooses"
    """Selects keys by comparing numbers, so that a rounding error can change some outputs by more than its own size."""
    SHARES_KV = "shares_kv"
    """Attends to keys and values that another layer computed, where it is configured to."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The paper that introduced a mechanism; without a title, of one that is not published."""

    title: str = ""
    authors: str = ""
    year: int = 0
    arxiv: str | None = None

    @property
    def cited(self) -> str:
        """Authors and year; "unpublished" without a title."""
        return f"{self.authors}, {self.year}" if self.title else "unpublished"

    @property
    def url(self) -> str | None:
        """The URL of the paper on arXiv; None where it is not there."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else None


class AttentionLayer(Protocol):
    """What `build` returns: a `torch.nn.Module` with these methods.

    It, or a module in it, may also have `take_auxiliary_loss() -> Tensor | None`, a scalar of the last training pass to
    be added once to the loss, and `after_update(summed)`, to be called after each optimizer step, which changes what is
    learned without gradients, as no forward pass does; `summed` adds up over all workers that share a batch.

    Further abilities are declared by attributes, see `ABILITIES`.
    """

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Compute attention over whole sequences.

        `query` [batch, query, width]; `source` [batch, key, width], only where the mechanism is cross;
        `key_padding_mask` [batch, key], bool, True where a key is real. Returns [batch, query, width]. Where
        `Capability.SHARES_KV` is declared, this method and `weights` also take the keyword `shared_kv`, the fields that
        `project_kv` of another layer returned. A layer configured with `shares_kv` requires it, and its `step` gets
        the states of the layer whose keys and values it attends to.
        """
        ...

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]. Required by `Capability.WEIGHTS`."""
        ...

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Outputs [tokens, width] for the new tokens [tokens, width] of many requests. Required by `INCREMENTAL`."""
        ...

    def project_kv(self, query: Tensor) -> Fields:
        """Fields [batch, key, ...] of whole sequences [batch, key, width] that other layers may attend to.

        Required by `Capability.SHARES_KV`; the fields are those of the layer's only state.
        """
        ...

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """Source states, state -> field [source, ...], of one source [source, width]. Required where cross."""
        ...


ABILITIES: Mapping[str, str] = {
    "takes_lengths": "forward takes lengths, those of documents packed end to end, which attend only to themselves",
    "takes_global_tokens": "forward takes global_tokens, bool [batch, query], which all tokens attend to",
    "takes_parses": "forward takes parses, int64 [batch, query], the head of each token in a dependency tree",
    "splits_tokens": "require_token_split and split_tokens split the tokens of a sequence over ranks",
}
"""Attributes of layers, bool, that declare an ability and what it means; False where a layer does not set them."""


class Mechanism(ABC):
    """One attention mechanism. Subclass `DeclaredMechanism` or `ComputedMechanism`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[Paper] = Paper()
    equation: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    Config: ClassVar[type[MechanismConfig]] = MechanismConfig
    sequential: ClassVar[bool] = False
    """Whether each token's computation needs the previous token's result: a loop, recompiled for every length."""
    asks_the_host: ClassVar[bool] = False
    """Whether steps need the number of cached tokens of each request on the host, so that they cannot be recorded."""
    counts_from_start: ClassVar[bool] = False
    """Whether layers count something from the first row, real or padding, in every config: blocks, or positions."""
    used_by: ClassVar[tuple[str, ...]] = ()
    """Well-known models with this attention that people run today; lists begin with those that have the most."""
    sketch: ClassVar[Mapping[str, Any]] = {}
    """Options for demonstrations on about a dozen tokens, where the defaults are meant for thousands of tokens."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_config_type(cls.Config, owner=cls.__qualname__)
        if "build" in vars(cls):
            cls.build = checked(cls.build)  # type: ignore[method-assign,assignment]
        if "cost" in vars(cls):
            cls.cost = priced(cls.cost)  # type: ignore[method-assign,assignment]

    def __repr__(self) -> str:
        return f"<mechanism {self.name!r}: {self.summary}>"

    _repr_html_ = sketch_card

    @property
    def idea(self) -> tuple[str, ...]:
        """An explanation of the mechanism in paragraphs of Markdown, the last of which says when to use it.

        Read from the section `## NAME` of the Markdown file beside the module that declares the mechanism. The file
        has the name of the module or, beside an `__init__.py`, is mechanism.md. Empty where there is none.
        """
        module = sys.modules[type(self).__module__]
        path = Path(module.__file__ or "")
        text = path.with_name("mechanism.md" if path.stem == "__init__" else f"{path.stem}.md")
        sections = re.split(r"^## ", text.read_text("utf-8"), flags=re.MULTILINE) if text.is_file() else []
        found = [section.partition("\n")[2] for section in sections if section.partition("\n")[0].strip() == self.name]
        return tuple(part.strip() for part in found[0].split("\n\n") if part.strip()) if found else ()

    def sequential_operations(self, length: int) -> int:
        """The operations over `length` tokens that wait for one another, 1 if none (Vaswani et al. 2017, table 1)."""
        return length if self.sequential else 1

    @property
    def drops_weights(self) -> bool:
        """Whether a layer applies `config.dropout` to its weights in training; if not, configs with it are refused."""
        return False

    def depends_on_padding(self, config: MechanismConfig) -> bool:
        """Whether padding before a sequence can change outputs; padding after a sequence never does."""
        return self.counts_from_start

    @property
    def output_bias_apart(self) -> bool:
        """Whether the bias of the output projection can be configured apart from those of the other projections."""
        return False

    @property
    def splits_heads(self) -> bool:
        """Whether heads are computed independently, so that a layer can be split into layers with some of its heads
        each, whose outputs add up: heads are first combined in the output projection, `output`. Code that depends on
        a head's index in the whole layer reads `config.heads_of`. See `attn_core.splitting`."""
        return False

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """The sizes of the blocks concatenated along the head axis of a learned tensor, by tensor name, such as those
        of queries, keys and values. Needed only for tensors of more than one block."""
        return {}

    def split_options(self, config: MechanismConfig, ranks: int) -> Mapping[str, Any]:
        """The options that differ in one rank's layer; raises `InvalidValue` where `ranks` does not divide them."""
        return {}

    @abstractmethod
    def build(self, config: MechanismConfig) -> Any:
        """Build a new `AttentionLayer` (a `torch.nn.Module`) with random weights.

        A hook checks the inputs before every call (see `InputCheck`), so that `forward` need not.
        """

    def share_weights(self, layers: Sequence[tuple[MechanismConfig, Any]]) -> None:  # noqa: B027 -- most share none
        """Tie weights of a model's layers, once all are built; `layers` has each one's config and module, in order."""

    @abstractmethod
    def state(self, config: MechanismConfig) -> StateSpecs:
        """The states that one layer keeps between steps, by name."""

    @abstractmethod
    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of one layer for one call: `forward` over whole sequences (a `Shape`), or a `Step` of serving.

        Implementations without `INCREMENTAL` only get a `Shape`: a step costs what replay computes, the whole
        sequence. Raises `InvalidValue` for whole sequences of self-attention with different numbers of queries and
        keys, and `Incompatible` for a step of a layer that cannot decode.
        """

    def spec(self, config: MechanismConfig) -> AttentionSpec | None:
        """The mechanism as data; None for a mechanism with a computation of its own."""
        return None

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The linear recurrence that kernels compute for a layer; None where there is none."""
        return None

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """The parts of a layer in evaluation on whole sequences of `tokens` tokens, and what computes each."""
        found = self.recurrence(config)
        return (Computation() if found is None else Computation(part="recurrence", asked=found),)

    def paged_computation(self, config: MechanismConfig) -> Computation | None:
        """The attention that a step lets kernels compute over the cache in place; None if it never does."""
        return None

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step that kernels can compute on fixed-size states in place; None if there is no such step."""
        return None

    def can(self, *capabilities: Capability) -> bool:
        """Whether all of these capabilities are declared."""
        return self.capabilities.issuperset(capabilities)

    @property
    def only_cross(self) -> bool:
        """Whether cross-attention is the only declared mode."""
        return self.can(Capability.CROSS) and not self.capabilities & {Capability.CAUSAL, Capability.BIDIRECTIONAL}


class ComputedMechanism(Mechanism):
    """A mechanism with its own module.

    Without `Capability.INCREMENTAL` its inputs are cached and the full sequence is computed again at each
    step (replay), which is slow but correct.
    """

    def state(self, config: MechanismConfig) -> StateSpecs:
        if self.can(Capability.INCREMENTAL):
            raise MechanismInvalid.of(
                self.name,
                "declares INCREMENTAL, but does not define state(config)",
                "define it to return the states that step keeps, {} for none",
            )
        return replay_state(config)


def replay_state(config: MechanismConfig) -> StateSpecs:
    """The state of a layer that recomputes the whole sequence at each step: all of its inputs "x" [hidden_size]."""
    return {"inputs": Paged({"x": Field((config.hidden_size,))})}


Build = Callable[["Mechanism", MechanismConfig], Any]


@dataclass(frozen=True)
class InputCheck:
    """Forward pre-hook that checks the inputs of a layer of the mechanism called `name`."""

    name: str
    hidden_size: int

    def __call__(self, _layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise `InvalidValue` for inputs that are not [batch, token, width] and for a mask that does not fit them."""
        # Dynamo in older versions of torch treats strict=False as True, and does not support `|` of dicts.
        arguments = {**dict(zip(("query", "source")[: len(given)], given[:2], strict=True)), **named}
        query, source, key_padding_mask = (arguments.get(field) for field in ("query", "source", "key_padding_mask"))
        if query is None:
            return
        self.check_rows("query", query, "[batch, query, width]")
        if source is not None:
            self.check_rows("source", source, "[batch, key, width]")
            if source.shape[0] != query.shape[0]:
                allowed = f"the batch size of the query, {query.shape[0]}, in mechanism {self.name!r}"
                raise InvalidValue.of("source", tuple(source.shape), allowed)
        if key_padding_mask is not None:
            self.check_key_padding_mask(key_padding_mask, query if source is None else source)

    def check_rows(self, field: str, rows: Any, axes: str) -> None:
        """Raise `InvalidValue` unless `rows` is a floating-point tensor of three axes, the last of `hidden_size`."""
        if getattr(rows, "is_nested", False):
            allowed = f"a padded tensor {axes} with a key_padding_mask, or tokens end to end with lengths"
            raise InvalidValue.of(field, "a nested tensor", allowed)
        if not hasattr(rows, "is_floating_point") or not rows.is_floating_point():
            allowed = f"a floating-point tensor {axes} in mechanism {self.name!r}"
            raise InvalidValue.of(field, str(getattr(rows, "dtype", type(rows).__name__)), allowed)
        if rows.dim() != 3 or rows.shape[-1] != self.hidden_size:
            allowed = f"{axes} of width {self.hidden_size} in mechanism {self.name!r}"
            raise InvalidValue.of(field, tuple(rows.shape), allowed)

    def check_key_padding_mask(self, key_padding_mask: Any, rows: Any) -> None:
        """Raise `InvalidValue` unless the mask is a bool tensor with one entry for every row."""
        mask, given = key_padding_mask, key_padding_mask.shape
        if mask.dim() != 2 or given[0] != rows.shape[0] or given[1] != rows.shape[1]:
            allowed = f"{tuple(rows.shape[:2])}, [batch, key], in mechanism {self.name!r}"
            raise InvalidValue.of("key_padding_mask", tuple(key_padding_mask.shape), allowed)
        if str(key_padding_mask.dtype) != "torch.bool":
            allowed = f"torch.bool, True where a key is real, in mechanism {self.name!r}"
            raise InvalidValue.of("key_padding_mask", str(key_padding_mask.dtype), allowed)


def checked(build: Build) -> Build:
    """Wrap `build`: check config and layer against the declaration, name the mechanism in errors, add `InputCheck`."""

    @wraps(build)
    def building(mechanism: Mechanism, config: MechanismConfig) -> Any:
        require_supported(mechanism, config)
        try:
            layer = build(mechanism, config)
        except InvalidValue as error:
            raise error.in_mechanism(mechanism.name) from error
        require_declared(mechanism, config, layer)
        require_replayed(mechanism, config)
        hooks = getattr(layer, "_forward_pre_hooks", None)
        if hooks is not None:
            layer.mechanism, layer.mechanism_config = mechanism, config
            for ability in ABILITIES:
                setattr(layer, ability, getattr(layer, ability, False))
        if hooks is not None and not any(isinstance(hook, InputCheck) for hook in hooks.values()):
            layer.register_forward_pre_hook(InputCheck(mechanism.name, config.hidden_size), with_kwargs=True)
        return layer

    return building


Price = Callable[["Mechanism", MechanismConfig, "Shape | Step"], Cost]


def priced(cost: Price) -> Price:
    """Wrap `cost` so that it is only called for shapes and steps that a layer of the mechanism can compute."""

    @wraps(cost)
    def pricing(mechanism: Mechanism, config: MechanismConfig, shape: Shape | Step) -> Cost:
        cross = config.cross
        if isinstance(shape, Step):
            if not cross and not config.causal:
                message = f"mechanism {mechanism.name!r} is configured with causal=False: it cannot decode step by step"
                raise Incompatible(message, mechanism=mechanism.name)
            if not mechanism.can(Capability.INCREMENTAL):
                shape = Shape(batch=shape.batch, query=shape.key, key=shape.source if cross else shape.key)
        elif not cross and shape.query != shape.key:
            allowed = f"as many keys as queries, {shape.query}, in self-attention; use Step for decode steps"
            raise InvalidValue.of("shape.key", shape.key, allowed)
        return cost(mechanism, config, shape)

    return pricing


METHODS = {Capability.INCREMENTAL: "step", Capability.WEIGHTS: "weights", Capability.SHARES_KV: "project_kv"}
"""The method that a layer must have for each of these capabilities, where its mechanism declares them."""


def require_declared(mechanism: Mechanism, config: MechanismConfig, layer: Any) -> None:
    """Raise `MechanismInvalid` for a layer without a method that its mechanism declares, or with an undeclared `step`.

    Without `Capability.INCREMENTAL` a model never calls `step`: it would recompute the whole sequence for every token.
    """
    for capability, method in METHODS.items():
        if mechanism.can(capability) and not hasattr(layer, method):
            what = f"declares {capability.name}, but its layer {type(layer).__name__} has no method {method}"
            raise MechanismInvalid.of(mechanism.name, what, f"implement it, or do not declare {capability.name}")
    if mechanism.can(Capability.INCREMENTAL) and config.cross and not hasattr(layer, "encode"):
        what = f"declares CROSS and INCREMENTAL, but its layer {type(layer).__name__} has no method encode"
        raise MechanismInvalid.of(mechanism.name, what, "implement it to return the states of a source")
    if mechanism.can(Capability.INCREMENTAL):
        mechanism.state(config)
    elif hasattr(layer, "step") and mechanism.spec(config) is None:
        what = f"does not declare INCREMENTAL, but its layer {type(layer).__name__} has a method step"
        remedy = "declare INCREMENTAL, else step is never called and every token recomputes the whole sequence"
        raise MechanismInvalid.of(mechanism.name, what, remedy)


def require_replayed(mechanism: Mechanism, config: MechanismConfig) -> None:
    """Raise `MechanismInvalid`, with names and shapes, where a causal mechanism without a step has another state than
    its inputs, which a model needs to recompute the sequence for every token.
    """
    own = mechanism.can(Capability.CAUSAL) and not config.cross and not config.shares_kv
    if not own or mechanism.can(Capability.INCREMENTAL):
        return
    given, needed = mechanism.state(config), replay_state(config)
    if given != needed:
        what = f"does not declare INCREMENTAL, but its state is {described(given)}, not {described(needed)}"
        remedy = "do not define state(), or declare INCREMENTAL and implement step"
        raise MechanismInvalid.of(mechanism.name, what, remedy)


def require_supported(mechanism: Mechanism, config: MechanismConfig) -> None:
    """Raise `Undeclared` for a field of the config that needs a capability which the mechanism does not declare.

    Checked are rotary positions, fewer key/value heads, keys and values of another layer, biases, the head size, the
    mode, and dropout of attention weights; a mechanism need not check them itself. A cross config has no rotary
    positions and no other layer's keys and values, whatever the mechanism supports in self-attention.
    """
    if config.dropout and not mechanism.drops_weights:
        what = "computes without attention weights, or does not apply dropout to them"
        raise _undeclared(mechanism, config, "dropout", "0", f"{what}: its dropout must be 0, not {config.dropout}")
    if config.has_output_bias != config.bias and not (mechanism.output_bias_apart and mechanism.can(Capability.BIAS)):
        what = "has biases in all projections or in none"
        raise _undeclared(mechanism, config, "output_bias", str(config.bias), what)
    for field, (uses_feature, capability, allowed) in ASKING.items():
        if uses_feature(config) and not mechanism.can(capability):
            raise _undeclared(mechanism, config, field, allowed, LACKING[capability])
    require_mode = _require_cross if config.cross else _require_direction
    require_mode(mechanism, config)


def _require_cross(mechanism: Mechanism, config: MechanismConfig) -> None:
    if not mechanism.can(Capability.CROSS):
        raise _undeclared(mechanism, config, "cross", "False", "attends to its own sequence, not to a source")
    for field, allowed in (("rotary", "None"), ("shares_kv", "False")):
        if getattr(config, field):
            why = "is configured cross, so that queries and keys come from different sequences"
            raise _undeclared(mechanism, config, field, allowed, why)


def _require_direction(mechanism: Mechanism, config: MechanismConfig) -> None:
    if mechanism.only_cross:
        raise _undeclared(mechanism, config, "cross", "True", "attends to a source, not to its own sequence")
    if config.causal and not mechanism.can(Capability.CAUSAL):
        raise _undeclared(mechanism, config, "causal", "False", "has no causal form")
    if not config.causal and mechanism.can(Capability.CAUSAL) and not mechanism.can(Capability.BIDIRECTIONAL):
        raise _undeclared(mechanism, config, "causal", "True", "only looks back")


def _undeclared(mechanism: Mechanism, config: MechanismConfig, field: str, allowed: str, why: str) -> Undeclared:
    given, allowed = getattr(config, field), f"{allowed}: mechanism {mechanism.name!r} {why}"
    message = f"{field}: {given!r} is not allowed; allowed: {allowed}"
    return Undeclared(message, field=field, given=given, allowed=allowed, mechanism=mechanism.name)


def _all_heads(config: MechanismConfig) -> int:
    return config.num_heads if config.heads_of is None else config.heads_of.total


ASKING: Mapping[str, tuple[Callable[[MechanismConfig], bool], Capability, str]] = {
    "rotary": (lambda config: config.rotary is not None, Capability.ROTARY, "None"),
    "num_kv_heads": (
        lambda config: config.num_kv_heads not in {None, config.num_heads},
        Capability.GROUPED,
        "as many as num_heads",
    ),
    "shares_kv": (lambda config: config.shares_kv, Capability.SHARES_KV, "False"),
    "bias": (lambda config: config.bias, Capability.BIAS, "False"),
    "head_dim": (
        lambda config: config.head_dim not in {None, config.hidden_size / _all_heads(config)},
        Capability.HEAD_DIM,
        "hidden_size / num_heads",
    ),
}
"""By config field: whether a config uses the feature, the capability that it needs, and what is allowed without it."""

LACKING = {
    Capability.ROTARY: "takes no rotary positions",
    Capability.GROUPED: "does not support fewer key/value heads than query heads",
    Capability.SHARES_KV: "cannot attend to the keys and values of another layer",
    Capability.BIAS: "does not support biases",
    Capability.HEAD_DIM: "does not support a head size other than hidden_size / num_heads",
}
