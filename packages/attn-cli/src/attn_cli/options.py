"""Options that several subcommands share: the config of a mechanism on the command line."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from attn_core import Capability, Mechanism, MechanismConfig, configure, installed
from attn_core.errors import InvalidValue


def mechanisms_starting(incomplete: str) -> list[str]:
    """The mechanisms whose names start with the incomplete word, for shell completion."""
    return [name for name in installed().mechanisms.names() if name.startswith(incomplete)]


MechanismName = Annotated[
    str,
    typer.Argument(help="Name of a mechanism; see `attn list mechanisms`.", autocompletion=mechanisms_starting),
]
HiddenSize = Annotated[int, typer.Option(min=1, help="Size of the residual stream of the model.")]
NumHeads = Annotated[int, typer.Option("--num-heads", min=1, help="Query heads.")]
NumKvHeads = Annotated[
    int | None, typer.Option("--num-kv-heads", min=1, help="Key/value heads, if fewer than query heads.")
]
HeadDim = Annotated[int | None, typer.Option(min=1, help="Elements of one head; by default hidden_size / num_heads.")]
Bidirectional = Annotated[
    bool, typer.Option("--bidirectional", help="Let every position attend to every other, without a causal mask.")
]
Dtype = Annotated[str, typer.Option(help="Element type: float32, bfloat16 (bf16), float16, float64.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the mechanism; may be repeated."),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that a user may give for a mechanism."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None = None
    causal: bool = True
    bias: bool = False
    max_seq_len: int | None = None
    shares_kv: bool = False

    def config(self, mechanism: Mechanism, options: dict[str, Any]) -> MechanismConfig:
        """The config of `mechanism` with these sizes; with the option `cross` it attends to a source, not causally."""
        cross = options.get("cross", mechanism.only_cross)
        return configure(mechanism, options, **dataclasses.asdict(self) | ({"causal": False} if cross is True else {}))


def own_groups(sizes: Sizes, mechanism: Mechanism, options: dict[str, Any]) -> Sizes:
    """The sizes without `num_kv_heads` if the mechanism requires a number of its own, as mqa requires one."""
    try:
        mechanism.state(sizes.config(mechanism, options))
    except InvalidValue as error:
        if sizes.num_kv_heads is None or error.metadata.get("field") != "num_kv_heads":
            raise
        return dataclasses.replace(sizes, num_kv_heads=None)
    return sizes


def supported_sizes(sizes: Sizes, mechanism: Mechanism) -> Sizes:
    """The sizes without what the mechanism does not support: a causal form, or fewer key/value heads."""
    shared = sizes.num_kv_heads if mechanism.can(Capability.GROUPED) else None
    causal = sizes.causal and mechanism.can(Capability.CAUSAL)
    return dataclasses.replace(sizes, causal=causal, num_kv_heads=shared)
