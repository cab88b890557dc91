"""Options that several subcommands share: the config of a mechanism, from the command line."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from attn_core import Capability, Mechanism, MechanismConfig, configure

HiddenSize = Annotated[int, typer.Option(min=1, help="Size of the residual stream of the model.")]
NumHeads = Annotated[int, typer.Option("--num-heads", min=1, help="Query heads.")]
NumKvHeads = Annotated[
    int | None, typer.Option("--num-kv-heads", min=1, help="Key/value heads, if fewer than query heads.")
]
HeadDim = Annotated[int | None, typer.Option(min=1, help="Elements of one head; by default hidden_size / num_heads.")]
Bidirectional = Annotated[bool, typer.Option("--bidirectional", help="Let every position see every other.")]
Dtype = Annotated[str, typer.Option(help="Element type: float32, bfloat16 (bf16), float16, float64.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the mechanism; repeat for more."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that a user may give for a mechanism."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None = None
    causal: bool = True
    shares_kv: bool = False

    def config(self, mechanism: Mechanism, options: dict[str, Any]) -> MechanismConfig:
        """The config of `mechanism` at these sizes."""
        return configure(mechanism, options, **dataclasses.asdict(self))


def fitting(sizes: Sizes, mechanism: Mechanism) -> Sizes:
    """The sizes with what the mechanism cannot have left out: a causal form, or fewer key/value heads."""
    shared = sizes.num_kv_heads if mechanism.can(Capability.GROUPED) else None
    causal = sizes.causal and mechanism.can(Capability.CAUSAL)
    return dataclasses.replace(sizes, causal=causal, num_kv_heads=shared)
