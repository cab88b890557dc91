"""Neural Turing machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core import Capability, ComputedMechanism, Cost, Field, MechanismConfig, Paper, Shape, Slot, StateSpecs, Step
from attn_core.checks import checked, require_whole
from attn_core.errors import InvalidValue

from attn_variants.mechanisms.common import BASIC


class NeuralTuringMachine(ComputedMechanism):
    """Heads read and write a memory of fixed size, which they address by content and by shifts from the last location.

    Each head is a read head and a write head; a slot has `head_dim` elements. The controller is one layer, whose inputs
    include the last reads, so that the past is carried only by the memory.
    """

    name = "ntm"
    summary = "heads that read and write a memory by content and location"
    paper = Paper(title="Neural Turing Machines", authors="Graves et al.", year=2014, arxiv="1410.5401")
    equation = (
        r"w^c = \mathrm{softmax}_i(\beta \cos(k, M_i)),\quad w^g = g w^c + (1 - g) w_{t-1},\quad"
        r" \tilde w = s * w^g,\quad w = \tilde w^\gamma / \textstyle\sum \tilde w^\gamma,\quad r = w^\top M,\quad"
        r" M \leftarrow M \circ (1 - w e^\top) + w a^\top"
    )
    capabilities = BASIC | frozenset(
        {
            Capability.CAUSAL,
            Capability.INCREMENTAL,
            Capability.EXACT,
            Capability.PADDING,
        }
    )
    sequential = True

    @dataclass(frozen=True, kw_only=True)
    class Config(MechanismConfig):
        """`slots` is the number of rows of the memory; `shift`, the largest move of a head per token, in slots."""

        slots: int = checked(128, require_whole, ge=1, unit="rows")
        shift: int = 1

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.shift != 0:
                require_whole("shift", self.shift, ge=1, unit="slots, or 0")
            if 2 * self.shift + 1 > self.slots:
                raise InvalidValue.of("shift", self.shift, f"a shift s with 2 s + 1 of at most {self.slots} slots")

    def build(self, config: MechanismConfig) -> Any:
        """A new `NtmLayer`; raises `InvalidValue` unless the key/value heads divide the heads."""
        from attn_variants.mechanisms.ntm_layer import NtmLayer

        heads, (slots, shift) = config.head_layout, sizes(config)
        return NtmLayer(heads, hidden_size=config.hidden_size, bias=config.bias, slots=slots, shift=shift)

    def state(self, config: MechanismConfig) -> StateSpecs:
        """The memory, and the last weights and reads of every head; in float32, as the memory is updated many times."""
        size, (slots, _) = config.head_layout.key_size, sizes(config)
        shapes = {"memory": (slots, size), "reading": (config.num_heads, slots), "writing": (config.num_heads, slots)}
        shapes["read"] = (config.num_heads, size)
        return {"machine": Slot({name: Field(shape, dtype="float32") for name, shape in shapes.items()})}

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost per token of three linear layers and, per head, four products with the memory (2 addressings, a
        write and a read)."""
        size, (slots, shift) = config.head_layout.key_size, sizes(config)
        inner = config.num_heads * size
        interface = config.num_heads * 2 * (2 * size + 2 * shift + 4)
        weights = (config.hidden_size + inner) * inner + inner * interface + 2 * inner * config.hidden_size
        biases = inner + interface + (config.hidden_size if config.bias else 0)
        flops = 2 * shape.batch * shape.query * (weights + 4 * inner * slots)
        return Cost(flops=flops, allowed_flops=flops, parameters=weights + biases + slots * size)


def sizes(config: MechanismConfig) -> tuple[int, int]:
    """The number of slots of the memory, and the largest shift."""
    own = NeuralTuringMachine.Config.of(config)
    return own.slots, own.shift
