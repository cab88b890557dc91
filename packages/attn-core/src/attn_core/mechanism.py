"""A mechanism: a plugin's unit. It is listed, priced, drawn, checked, trained and served by this contract alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attn_core.batch import Fields, LayerState, RaggedBatch
from attn_core.capability import Capability
from attn_core.computation import Computation
from attn_core.config import MechanismConfig, check_config_type
from attn_core.cost import Cost, Shape
from attn_core.inputs import checked
from attn_core.state import Field, Paged, StateSpecs

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.recurrence import RecurrenceSpec
    from attn_core.spec import AttentionSpec


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
    """What `build` returns: a `torch.nn.Module` with these methods."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attend over whole sequences.

        `query` [batch, query, width]; `source` [batch, key, width], only where the mechanism is cross;
        `keep` [batch, key], bool, True where a key is real. Returns [batch, query, width]. Where `Capability.BORROWS`
        is declared it takes `borrowed` too, by keyword, what `lend` of another layer gave; so does `weights`. A layer
        whose config says that it borrows needs it, and its `step` is given the states of the layer that lends.
        """
        ...

    def weights(self, query: Tensor, source: Tensor | None = None, *, keep: Tensor | None = None) -> Tensor:
        """Attention weights [batch, heads, query, key]; where `Capability.WEIGHTS` is declared."""
        ...

    def step(self, query: Tensor, batch: RaggedBatch, state: LayerState) -> Tensor:
        """Attend for the new rows [tokens, width] of many requests; where `Capability.INCREMENTAL` is declared."""
        ...

    def lend(self, query: Tensor) -> Fields:
        """What other layers may attend to, field [batch, key, ...], of whole sequences [batch, key, width].

        Where `Capability.BORROWS` is declared; the fields are those of the layer's only state.
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

    @property
    def drops_weights(self) -> bool:
        """Whether a layer drops attention weights in training where its config says so; whoever does not is never
        asked to."""
        return False

    @abstractmethod
    def build(self, config: MechanismConfig) -> Any:
        """A fresh `AttentionLayer` (a `torch.nn.Module`) with random weights.

        Whatever it is called with is checked first, see `InputCheck`; `forward` need not.
        """

    @abstractmethod
    def state(self, config: MechanismConfig) -> StateSpecs:
        """What one layer must remember between steps."""

    @abstractmethod
    def cost(self, config: MechanismConfig, shape: Shape) -> Cost:
        """The price of one layer at `shape`."""

    def spec(self, config: MechanismConfig) -> AttentionSpec | None:
        """The mechanism as data, or None where it computes its own way."""
        return None

    def recurrence(self, config: MechanismConfig) -> RecurrenceSpec | None:
        """The linear recurrence that a layer asks kernels to compute, or None where it asks for none."""
        return None

    def computations(self, config: MechanismConfig, tokens: int) -> tuple[Computation, ...]:
        """Who computes whole sequences of `tokens` tokens in evaluation: kernels, or the layer's own module."""
        found = self.recurrence(config)
        return (Computation() if found is None else Computation(part="recurrence", asked=found),)

    def paged_computation(self, config: MechanismConfig) -> Computation | None:
        """What its step asks of kernels that meet remembered rows where a cache keeps them; None where it never
        does."""
        return None

    def can(self, *capabilities: Capability) -> bool:
        """Whether all of these are declared."""
        return self.capabilities.issuperset(capabilities)


class ComputedMechanism(Mechanism):
    """A mechanism with its own module.

    Without `Capability.INCREMENTAL` its inputs are remembered and the full sequence is run again at each
    step (replay): slow and right.
    """

    def state(self, config: MechanismConfig) -> StateSpecs:
        if self.can(Capability.INCREMENTAL):
            raise TypeError(
                f"{type(self).__name__} declares INCREMENTAL, so it must say what its step remembers: state()"
            )
        return {"inputs": Paged({"x": Field((config.width,))})}
