"""A mechanism: the unit that a plugin offers, by which it is listed, priced, drawn, checked, trained and served."""

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
from attn_core.errors import Incompatible, InvalidValue, MechanismInvalid, Undeclared
from attn_core.kernels.attend import AttentionInputs
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
    """One ability. A law applies where its capability is declared."""

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
    """Weights are not negative and sum to one over the allowed keys."""
    PADDING = "padding"
    """Takes a mask of padded keys."""
    ROTARY = "rotary"
    """Takes rotary positions."""
    GROUPED = "grouped"
    """Takes fewer key/value heads than query heads."""
    BIAS = "bias"
    """Adds biases to its projections where it is configured to."""
    HEAD_DIM = "head_dim"
    """Takes heads of another size than `hidden_size / num_heads`."""
    CHOOSES = "chooses"
    """Picks among keys by comparing numbers, so that rounding may change some answers by more than its own size."""
    SHARES_KV = "shares_kv"
    """Attends to keys and values that another layer made, where it is configured to."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where a mechanism comes from."""

    title: str
    authors: str
    year: int
    arxiv: str | None = None

    @property
    def url(self) -> str | None:
        """The paper's page, where it is on arXiv."""
        return f"https://arxiv.org/abs/{self.arxiv}" if self.arxiv else None


class AttentionLayer(Protocol):
    """What `build` returns: a `torch.nn.Module` with these methods.

    It may also have `take_auxiliary_loss() -> Tensor | None`: a scalar that the last pass of training leaves, to be
    added once to the loss.
    """

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attend over whole sequences.

        `query` [batch, query, width]; `source` [batch, key, width], only where the mechanism is cross;
        `key_padding_mask` [batch, key], bool, True where a key is real. Returns [batch, query, width]. Where
        `Capability.SHARES_KV` is declared it takes `shared_kv` too, by keyword, what `project_kv` of another layer
        gave; so does `weights`. A layer whose config says `shares_kv` needs it, and its `step` is given the states of
        the layer whose keys and values it attends to.
        """
        ...

    def weights(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; where `Capability.WEIGHTS` is declared."""
        ...

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; where `Capability.INCREMENTAL` is declared."""
        ...

    def project_kv(self, query: Tensor) -> Fields:
        """What other layers may attend to, field [batch, key, ...], of whole sequences [batch, key, width].

        Where `Capability.SHARES_KV` is declared; the fields are those of the layer's only state.
        """
        ...

    def encode(self, source: Tensor) -> Mapping[str, Fields]:
        """The source states, state -> field [source, ...], of one source [source, width]; where cross."""
        ...


class Mechanism(ABC):
    """One attention mechanism. Subclass `DeclaredMechanism` or `ComputedMechanism`."""

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[Paper]
    equation: ClassVar[str]
    capabilities: ClassVar[frozenset[Capability]]
    Config: ClassVar[type[MechanismConfig]] = MechanismConfig
    sequential: ClassVar[bool] = False
    """Whether each token's computation needs the result of the one before: a loop, compiled anew for each length."""
    sketch: ClassVar[Mapping[str, Any]] = {}
    """Options at which a dozen tokens show what it does, where its defaults are made for thousands."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_config_type(cls.Config, owner=cls.__qualname__)
        if "build" in vars(cls):
            cls.build = checked(cls.build)  # type: ignore[method-assign,assignment]
        if "cost" in vars(cls):
            cls.cost = priced(cls.cost)  # type: ignore[method-assign,assignment]

    @property
    def idea(self) -> tuple[str, ...]:
        """What the idea is, in paragraphs of Markdown, the last of which says when to use it.

        They stand under a heading `## NAME` in the Markdown file beside the module that declares the mechanism, which
        is called as the module or, beside an `__init__.py`, mechanism.md. Empty where there is none.
        """
        module = sys.modules[type(self).__module__]
        path = Path(module.__file__ or "")
        text = path.with_name("mechanism.md" if path.stem == "__init__" else f"{path.stem}.md")
        sections = re.split(r"^## ", text.read_text("utf-8"), flags=re.MULTILINE) if text.is_file() else []
        found = [section.partition("\n")[2] for section in sections if section.partition("\n")[0].strip() == self.name]
        return tuple(part.strip() for part in found[0].split("\n\n") if part.strip()) if found else ()

    @property
    def drops_weights(self) -> bool:
        """Whether a layer drops attention weights in training where its config says so; whoever does not is never
        asked to."""
        return False

    @property
    def output_bias_apart(self) -> bool:
        """Whether a layer's output projection can have a bias where the others have none, and the other way round."""
        return False

    @property
    def splits_heads(self) -> bool:
        """Whether heads are computed apart: a layer is the sum of layers of some of its heads each, the output
        projection, `output`, being the first place where heads meet. What depends on a head's place among all
        reads `config.heads_of`. See `attn_core.splitting`.
        """
        return False

    def joint_parameters(self, config: MechanismConfig) -> Mapping[str, tuple[int, ...]]:
        """Sizes of what lies side by side along the axis of heads of a learned tensor, by its name; those of queries,
        keys and values, say. Needed where that is more than one thing."""
        return {}

    def split_options(self, config: MechanismConfig, ranks: int) -> Mapping[str, Any]:
        """Own options of a rank's layer that are not those of the whole; raises `InvalidValue` where ranks do not
        divide them."""
        return {}

    @abstractmethod
    def build(self, config: MechanismConfig) -> Any:
        """A fresh `AttentionLayer` (a `torch.nn.Module`) with random weights.

        Whatever it is called with is checked first, see `InputCheck`; `forward` need not.
        """

    def share_weights(self, layers: Sequence[tuple[MechanismConfig, Any]]) -> None:  # noqa: B027 -- most share none
        """Let layers of one model share the weights that they are to share; the config and module of each, in order.

        A model calls it once all its layers are built. Nothing is shared unless a mechanism says so.
        """

    @abstractmethod
    def state(self, config: MechanismConfig) -> StateSpecs:
        """What one layer must remember between steps."""

    @abstractmethod
    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The price of one layer for one call: `forward` over whole sequences, a `Shape`, or a `Step` of serving.

        Where `INCREMENTAL` is not declared only shapes are asked for: a step is priced as what replay computes, the
        whole sequence. Raises `InvalidValue` for whole sequences of self-attention whose keys are not as many as their
        queries, and `Incompatible` for a step of what cannot decode.
        """

    def spec(self, config: MechanismConfig) -> AttentionSpec | None:
        """The mechanism as data, or None where it computes its own way."""
        return None

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The linear recurrence that a layer asks kernels to compute, or None where it asks for none."""
        return None

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """What computes whole sequences of `tokens` tokens in evaluation: kernels, or the layer's own module."""
        found = self.recurrence(config)
        return (Computation() if found is None else Computation(part="recurrence", asked=found),)

    def paged_computation(self, config: MechanismConfig) -> Computation | None:
        """What its step asks of kernels that meet remembered rows where a cache keeps them; None if it never does."""
        return None

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """What a decode step asks of kernels over states of fixed size in place; None where it asks nothing."""
        return None

    def can(self, *capabilities: Capability) -> bool:
        """Whether all of these are declared."""
        return self.capabilities.issuperset(capabilities)

    @property
    def only_cross(self) -> bool:
        """Whether attention to a source is the one mode that is declared."""
        return self.can(Capability.CROSS) and not self.capabilities & {Capability.CAUSAL, Capability.BIDIRECTIONAL}


class ComputedMechanism(Mechanism):
    """A mechanism with its own module.

    Without `Capability.INCREMENTAL` its inputs are remembered and the full sequence is run again at each
    step (replay): slow and right.
    """

    def state(self, config: MechanismConfig) -> StateSpecs:
        if self.can(Capability.INCREMENTAL):
            raise MechanismInvalid.of(
                self.name,
                "declares INCREMENTAL and does not say what its step remembers",
                "define state(config), {} where it is nothing",
            )
        return replay_state(config)


def replay_state(config: MechanismConfig) -> StateSpecs:
    """The inputs of all tokens, "x" [hidden_size], of a layer that is run again over the whole sequence."""
    return {"inputs": Paged({"x": Field((config.hidden_size,))})}


Attend = Callable[[AttentionInputs], Tensor]
"""The spec over given operands: outputs [batch, query, heads, value_size], or weights [batch, heads, query, key]."""


class InnerAttention:
    """Base, beside `torch.nn.Module`, of the module that `DeclaredMechanism.inner` builds.

    The layer of the spec projects rows to queries, keys and values, turns them to their positions, remembers them
    from step to step and projects what comes out; the inner module only has a method

        forward(rows, operands, attend) -> [batch, query, ...]

    `rows` [batch, query, width] are the inputs that the queries come from, `operands` what they meet, and
    `attend(operands)` is the spec's own attention through whichever kernel fits. The last axes of the result have
    heads x value_size elements in all.
    """

    def remember(self, rows: Tensor) -> Fields:
        """Further fields [batch, key, ...] of rows [batch, key, width], found again in `AttentionInputs.fields`.

        Their shapes are those of `DeclaredMechanism.further_fields`.
        """
        return {}

    def weights(self, rows: Tensor, operands: AttentionInputs, attend: Attend) -> Tensor:
        """Attention weights [batch, heads, query, key]; here `attend(operands)` gives the spec's own."""
        raise Incompatible(f"{type(self).__name__} has no attention weights")


Build = Callable[["Mechanism", MechanismConfig], Any]


@dataclass(frozen=True)
class InputCheck:
    """Called before the `forward` of a layer of the mechanism called `name`, with what it is given."""

    name: str
    hidden_size: int

    def __call__(self, _layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise `InvalidValue` for rows that are not [batch, token, width] and padding that does not fit them."""
        # Dynamo of older torch takes strict=False for True, and knows no `|` of dicts.
        taken = {**dict(zip(("query", "source")[: len(given)], given[:2], strict=True)), **named}
        query, source, key_padding_mask = (taken.get(field) for field in ("query", "source", "key_padding_mask"))
        if query is None:
            return
        self.check_rows("query", query, "[batch, query, width]")
        if source is not None:
            self.check_rows("source", source, "[batch, key, width]")
            if source.shape[0] != query.shape[0]:
                allowed = f"as many sequences as queries, {query.shape[0]}, in mechanism {self.name!r}"
                raise InvalidValue.of("source", tuple(source.shape), allowed)
        if key_padding_mask is not None:
            self.check_key_padding_mask(key_padding_mask, query if source is None else source)

    def check_rows(self, field: str, rows: Any, axes: str) -> None:
        """Raise `InvalidValue` unless the rows are a floating-point tensor with three axes and the width."""
        if not hasattr(rows, "is_floating_point") or not rows.is_floating_point():
            allowed = f"a floating-point tensor {axes} in mechanism {self.name!r}"
            raise InvalidValue.of(field, str(getattr(rows, "dtype", type(rows).__name__)), allowed)
        if rows.dim() != 3 or rows.shape[-1] != self.hidden_size:
            allowed = f"{axes} of width {self.hidden_size} in mechanism {self.name!r}"
            raise InvalidValue.of(field, tuple(rows.shape), allowed)

    def check_key_padding_mask(self, key_padding_mask: Any, rows: Any) -> None:
        """Raise `InvalidValue` unless it says of every row, by a bool, whether it is real."""
        mask, given = key_padding_mask, key_padding_mask.shape
        if mask.dim() != 2 or given[0] != rows.shape[0] or given[1] != rows.shape[1]:
            allowed = f"{tuple(rows.shape[:2])}, [batch, key], in mechanism {self.name!r}"
            raise InvalidValue.of("key_padding_mask", tuple(key_padding_mask.shape), allowed)
        if str(key_padding_mask.dtype) != "torch.bool":
            allowed = f"torch.bool, True where a key is real, in mechanism {self.name!r}"
            raise InvalidValue.of("key_padding_mask", str(key_padding_mask.dtype), allowed)


def checked(build: Build) -> Build:
    """`build`, whose errors name the mechanism, and whose layers check what they are given, once."""

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
        if hooks is not None and not any(isinstance(hook, InputCheck) for hook in hooks.values()):
            layer.register_forward_pre_hook(InputCheck(mechanism.name, config.hidden_size), with_kwargs=True)
        return layer

    return building


Price = Callable[["Mechanism", MechanismConfig, "Shape | Step"], Cost]


def priced(cost: Price) -> Price:
    """`cost`, asked only for calls that a layer of the mechanism can be given."""

    @wraps(cost)
    def pricing(mechanism: Mechanism, config: MechanismConfig, shape: Shape | Step) -> Cost:
        cross = config.cross
        if isinstance(shape, Step):
            if not cross and not config.causal:
                message = f"mechanism {mechanism.name!r} is configured not causal: it takes no steps"
                raise Incompatible(message, mechanism=mechanism.name)
            if not mechanism.can(Capability.INCREMENTAL):
                shape = Shape(batch=shape.batch, query=shape.key, key=shape.source if cross else shape.key)
        elif not cross and shape.query != shape.key:
            allowed = f"as many keys as queries, {shape.query}: a sequence attends to itself; steps are a Step"
            raise InvalidValue.of("shape.key", shape.key, allowed)
        return cost(mechanism, config, shape)

    return pricing


METHODS = {
    Capability.INCREMENTAL: "step",
    Capability.WEIGHTS: "weights",
    Capability.SHARES_KV: "project_kv",
}
"""What the layer of a mechanism that declares a capability has."""


def require_declared(mechanism: Mechanism, config: MechanismConfig, layer: Any) -> None:
    """Raise `MechanismInvalid` for a layer without a method that its mechanism declares, or with a step that it hides.

    Without `Capability.INCREMENTAL` a model never calls a `step`: it would run the whole sequence for every token.
    """
    for capability, method in METHODS.items():
        if mechanism.can(capability) and not hasattr(layer, method):
            what = f"declares {capability.name}, and its layer {type(layer).__name__} has no method {method}"
            raise MechanismInvalid.of(mechanism.name, what, f"write it, or take {capability.name} from capabilities")
    if mechanism.can(Capability.INCREMENTAL) and config.cross and not hasattr(layer, "encode"):
        what = f"declares CROSS and INCREMENTAL, and its layer {type(layer).__name__} has no method encode"
        raise MechanismInvalid.of(mechanism.name, what, "write it: it gives the states of a source")
    if mechanism.can(Capability.INCREMENTAL):
        mechanism.state(config)
    elif hasattr(layer, "step") and mechanism.spec(config) is None:
        what = f"does not declare INCREMENTAL, and its layer {type(layer).__name__} has a method step"
        raise MechanismInvalid.of(
            mechanism.name, what, "declare it, or nothing calls the step: the whole sequence is computed at every token"
        )


def require_replayed(mechanism: Mechanism, config: MechanismConfig) -> None:
    """Raise `MechanismInvalid`, with names and shapes, where a causal mechanism without a step remembers other things
    than its inputs, which a model runs again for every token.
    """
    own = mechanism.can(Capability.CAUSAL) and not config.cross and not config.shares_kv
    if not own or mechanism.can(Capability.INCREMENTAL):
        return
    given, needed = mechanism.state(config), replay_state(config)
    if given != needed:
        what = f"does not declare INCREMENTAL, and its state is {described(given)}, not {described(needed)}"
        remedy = "leave state() out, or declare INCREMENTAL and write a step"
        raise MechanismInvalid.of(mechanism.name, what, remedy)


def require_supported(mechanism: Mechanism, config: MechanismConfig) -> None:
    """Raise `Undeclared` for a field of the config that asks for what the mechanism does not declare.

    So refused are positions that are rotary, key/value heads that are fewer, keys and values of another layer, biases,
    heads of a size of their own, a mode, and dropout of weights. A mechanism need not look for them itself. What is
    cross has no rotary positions, and no other layer's keys and values, whatever the mechanism can do without a source.
    """
    if config.dropout and not mechanism.drops_weights:
        what = "computes without attention weights, or in a way of its own"
        raise _undeclared(mechanism, config, "dropout", "0", f"{what}: its dropout must be 0, not {config.dropout}")
    if config.has_output_bias != config.bias and not (mechanism.output_bias_apart and mechanism.can(Capability.BIAS)):
        what = "has biases in all projections or in none"
        raise _undeclared(mechanism, config, "output_bias", str(config.bias), what)
    for field, (asks, capability, allowed) in ASKING.items():
        if asks(config) and not mechanism.can(capability):
            raise _undeclared(mechanism, config, field, allowed, LACKING[capability])
    if config.cross:
        _require_cross(mechanism, config)
    else:
        _require_direction(mechanism, config)


def _require_cross(mechanism: Mechanism, config: MechanismConfig) -> None:
    if not mechanism.can(Capability.CROSS):
        raise _undeclared(mechanism, config, "cross", "False", "attends to its own sequence, not to a source")
    for field, allowed in (("rotary", "None"), ("shares_kv", "False")):
        if getattr(config, field):
            why = "is configured cross, and queries and keys are of different sequences"
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
"""Fields of a config: when they ask for something, for which capability, and what every mechanism allows."""

LACKING = {
    Capability.ROTARY: "takes no rotary positions",
    Capability.GROUPED: "has no heads that share keys and values",
    Capability.SHARES_KV: "cannot attend to the keys and values of another layer",
    Capability.BIAS: "has no biases",
    Capability.HEAD_DIM: "has no heads of a size of their own",
}
