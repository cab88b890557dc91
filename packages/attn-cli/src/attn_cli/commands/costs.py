"""The commands `attn compare` and `attn cost`, which compute the cost of attention before anything runs."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from attn_core import (
    Capability,
    Cost,
    Mechanism,
    MechanismConfig,
    Shape,
    StateSpecs,
    Step,
    installed,
    state_bytes,
)
from attn_core.errors import Incompatible, InvalidValue, MissingPackage, UnknownName
from attn_core.models import ModelShape, checked_kv_sharing, kv_source_layer_of
from attn_core.options import parse_options
from attn_core.states import dtype_name
from attn_schema.output import Json, print_json, print_table

from attn_cli.comparison import comparison, priced
from attn_cli.main import CommandElsewhere, FlagCommand, load
from attn_cli.options import (
    Bidirectional,
    Dtype,
    HeadDim,
    HiddenSize,
    NumHeads,
    NumKvHeads,
    Options,
    Sizes,
    own_groups,
)
from attn_cli.output import human_bytes, human_count, print_facts
from attn_cli.pictures import draw_curves

CURVES = {"allowed_flops": "FLOPs of a forward pass", "state_bytes": "bytes of state"}
TRAINING = "compare-training"
"""The command that compares by training, in a package that may not be installed."""


class CompareCommand(FlagCommand):
    """The comparison of costs, or with `--train` the comparison by training of an installed package."""

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Create the context of the command that the arguments select."""
        if any(arg == "--train" or arg.startswith("--train=") for arg in args):
            return _training_command().make_context(info_name, args, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _training_command() -> Any:
    """The command behind `--train`; raises `CommandElsewhere` if its package is not installed."""
    try:
        return load(installed().commands.get(TRAINING))
    except UnknownName as error:
        raise CommandElsewhere.for_command(TRAINING) or error from error


compare_app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@compare_app.command(name="compare", cls=CompareCommand)
def compare_command(
    names: Annotated[
        list[str],
        typer.Argument(help="Names of mechanisms, as in `attn list mechanisms`, or lstm or convolution."),
    ],
    seq: Annotated[str, typer.Option(metavar="N,N,...", help="Sequence lengths in tokens.")] = "1024,4096,16384",
    hidden_size: HiddenSize = 512,
    num_heads: NumHeads = 8,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    bidirectional: Bidirectional = False,
    dtype: Dtype = "float32",
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the curves to a PNG, SVG or PDF.")
    ] = None,
    json: Json = False,
) -> None:
    """Compare the compute and the memory of mechanisms, one layer each, as sequences grow.

    Example: `attn compare mha sliding_window linear --seq 1024,16384 --draw curves.png`. `--num-kv-heads` applies
    only to mechanisms that can share key/value heads; a mechanism without a causal form is priced as bidirectional.
    "In sequence" are the operations that must wait for one another: an LSTM's steps, or a sort's; 1 where all tokens
    are computed at once.

    With `--train NAMES --budget flops=1e12`, mechanisms are trained with equal budgets and compared: see
    `attn compare --train mha --help`.
    """
    lengths = parse_lengths(seq)
    sizes = Sizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=not bidirectional,
    )
    rows = priced(names, sizes, lengths, dtype_name(dtype))
    if draw is not None:
        dense = with_powers_of_two(lengths)
        draw_curves(curves(priced(names, sizes, dense, dtype_name(dtype))), dense, draw)
    if json:
        print_json(rows)
    else:
        print_table([comparison(facts) for facts in rows], "no mechanism was named")


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """The curves to draw: title of a panel -> mechanism -> values by length."""
    panels: dict[str, dict[str, list[float]]] = {}
    for key, title in CURVES.items():
        for facts in rows:
            panels.setdefault(title, {}).setdefault(facts["name"], []).append(facts[key])
    return panels


def with_powers_of_two(lengths: list[int]) -> list[int]:
    """The lengths and the powers of two between them, so that a curve bends where its mechanism's cost does."""
    powers = [2**power for power in range(lengths[0].bit_length(), lengths[-1].bit_length())]
    return sorted({*lengths, *(power for power in powers if power < lengths[-1])})


def parse_lengths(text: str) -> list[int]:
    """Parse lengths such as "1024,4096", and sort them; raises `InvalidValue`."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise InvalidValue.of("--seq", text, "whole numbers from 1, with commas between them")
    return lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch` sequences of `seq` tokens, with encoder inputs of `source` tokens if the model has an encoder.

    States have elements of `dtype`, and are stored as the cache `kv_cache` does; if it is None, as they are.
    """

    batch: int
    seq: int
    source: int
    dtype: str
    kv_cache: str | None

    def state_bytes(self, states: StateSpecs) -> int:
        """The size of the states of one layer and one sequence, in bytes."""
        if self.kv_cache is None:
            return state_bytes(states, tokens=self.seq, source=self.source, dtype=self.dtype)
        family = installed().caches.get(self.kv_cache)
        return family.bytes({"layer": states}, tokens=self.seq, source=self.source, dtype=self.dtype)


class AttentionChanges(NamedTuple):
    """The changes that the user requests to the model's attention; None, False and empty values change nothing."""

    attention: str | None
    options: dict[str, Any]
    num_kv_heads: int | None
    bidirectional: bool
    kv_sharing: str


@dataclass(frozen=True, kw_only=True)
class Layers:
    """`number` attention layers of one kind.

    `self` is the self-attention of the decoder (or only stack), `encoder` the self-attention of an encoder, and `cross`
    the attention of the decoder to the encoder's outputs.
    """

    kind: str
    number: int
    mechanism: Mechanism
    config: MechanismConfig

    def forward(self, work: Workload) -> Cost:
        """The cost of a forward pass over whole sequences."""
        query = work.source if self.kind == "encoder" else work.seq
        key = work.seq if self.kind == "self" else work.source
        return self._all(Shape(batch=work.batch, query=query, key=key))

    def decode(self, work: Workload) -> Cost:
        """The cost of the decode step that computes the last token of every sequence."""
        source = work.source if self.kind == "cross" else 0
        return self._all(Step(batch=work.batch, new=1, remembered=work.seq - 1, source=source))

    def remembered(self, work: Workload) -> int:
        """The size of the states of one sequence in these layers, in bytes."""
        return self.number * work.state_bytes(self.mechanism.state(self.config))

    def _all(self, call: Shape | Step) -> Cost:
        return functools.reduce(operator.add, [self.mechanism.cost(self.config, call)] * self.number)


def cost_command(
    shape: Annotated[str, typer.Argument(help="Name of a known model; see `attn list shapes`.")],
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 1024,
    encoder_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per encoder input, for encoder-decoder models; default: --seq.")
    ] = None,
    dtype: Dtype = "bfloat16",
    num_kv_heads: NumKvHeads = None,
    attention: Annotated[str | None, typer.Option(help="Mechanism to use in place of the model's own.")] = None,
    bidirectional: Bidirectional = False,
    kv_cache: Annotated[str | None, typer.Option(help="Cache that stores the states; see `attn list caches`.")] = None,
    option: Options = None,
    kv_sharing: Annotated[
        str, typer.Option(help="Layers that share keys and values: cla:N (N neighbours) or yoco (the upper half).")
    ] = "",
    json: Json = False,
) -> None:
    """Compute the cache size, FLOPs and parameters of attention in a known model, before anything runs.

    Example: `attn cost llama-3-70b --batch 8 --seq 1000 --dtype bf16` shows a cache of 2.62 GB; with
    `--num-kv-heads 64`, as without grouped heads, 20.97 GB; with `--kv-cache int8`, 1.33 GB; with
    `--kv-sharing cla:2`, 1.31 GB. Encoders, and any model with `--bidirectional`, have no cache and no decode step.
    """
    if not installed().shapes.names():
        raise MissingPackage.of("attn-models", "the price of a known model")
    model = installed().shapes.get(shape)
    if encoder_len is not None and not model.encoder_layers:
        raise InvalidValue.of("--encoder-len", encoder_len, f"none, as {model.name} is not an encoder-decoder model")
    work = Workload(batch=batch, seq=seq, source=encoder_len or seq, dtype=dtype_name(dtype), kv_cache=kv_cache)
    changes = AttentionChanges(attention, parse_options(option), num_kv_heads, bidirectional, kv_sharing)
    facts = attention_costs(model, work, changes)
    if json:
        print_json(facts)
        return
    readable: dict[str, Any] = {}
    for key, value in facts.items():
        if "bytes" in key:
            readable[key.replace("bytes", "size")] = f"{human_bytes(value)} ({value} bytes)"
        elif "flops" in key or "parameters" in key:
            readable[key] = human_count(value)
        else:
            readable[key] = value
    print_facts(readable)


def attention_costs(model: ModelShape, work: Workload, changes: AttentionChanges) -> dict[str, Any]:
    """The total costs of all attention layers; FLOPs count only the query-key pairs that the mask allows."""
    stack = stack_of(model, work, changes)
    own = stack[0]
    sharing = sum(layers.number for layers in stack if layers.config.shares_kv)
    facts: dict[str, Any] = {
        "shape": model.name,
        "attention": own.mechanism.name,
        "num_layers": model.num_layers,
        **({"encoder_layers": model.encoder_layers} if model.encoder_layers else {}),
        "layers_with_own_keys": model.num_layers - sharing,
        "num_heads": model.num_heads,
        "num_kv_heads": kv_heads(own.mechanism, own.config),
        "batch": work.batch,
        "seq": work.seq,
        **({"encoder_len": work.source} if model.encoder_layers else {}),
        "dtype": work.dtype,
    }
    forward = functools.reduce(operator.add, [layers.forward(work) for layers in stack])
    if own.config.causal:
        steps = [layers for layers in stack if layers.kind != "encoder"]
        one = sum(layers.remembered(work) for layers in steps)
        decode = functools.reduce(operator.add, [layers.decode(work) for layers in steps])
        facts |= {
            "cache_bytes": work.batch * one,
            "cache_bytes_per_sequence": one,
            "attention_parameters": forward.parameters,
            "attention_prefill_flops": forward.allowed_flops,
            "attention_decode_step_flops": decode.allowed_flops,
        }
    else:
        facts |= {"attention_parameters": forward.parameters, "attention_forward_flops": forward.allowed_flops}
    changed = changes.attention, changes.num_kv_heads, changes.kv_sharing
    if not any(changed) and not changes.options and model.parameters is not None:
        facts["model_parameters"] = model.parameters
        facts["active_parameters"] = model.active_parameters or model.parameters
    return facts if work.kv_cache is None else {"kv_cache": work.kv_cache, **facts}


def kv_heads(mechanism: Mechanism, config: MechanismConfig) -> int:
    """The number of key/value heads of the mechanism with this config."""
    spec = mechanism.spec(config)
    return spec.heads.key_value if spec is not None else config.num_kv_heads or config.num_heads


def stack_of(model: ModelShape, work: Workload, changes: AttentionChanges) -> list[Layers]:
    """The attention layers of the model; first come those of the decoder (or only stack) with keys of their own."""
    mechanism = installed().mechanisms.get(changes.attention or model.mechanism)
    if mechanism.only_cross or changes.options.get("cross"):
        message = f"mechanism {mechanism.name!r} computes cross-attention; {model.name} needs self-attention"
        raise Incompatible(message, mechanism=mechanism.name)
    options = changes.options if changes.attention else {**(model.options or {}), **changes.options}
    causal = model.causal and not changes.bidirectional
    groups = model.num_kv_heads if mechanism.can(Capability.GROUPED) or not changes.attention else None
    sizes = Sizes(
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=changes.num_kv_heads or groups,
        head_dim=model.head_dim,
        causal=causal,
        bias=model.bias,
        max_seq_len=max(work.seq, work.source),
    )
    if changes.num_kv_heads is None:
        sizes = own_groups(sizes, mechanism, options)
    count = model.num_layers
    shared = checked_kv_sharing(changes.kv_sharing or (), count)
    own = sum(kv_source_layer_of(shared, layer, count) == layer for layer in range(count))
    stack = [Layers(kind="self", number=own, mechanism=mechanism, config=sizes.config(mechanism, options))]
    if own < count:
        config = replace(sizes, shares_kv=True).config(mechanism, options)
        stack.append(Layers(kind="self", number=count - own, mechanism=mechanism, config=config))
    if model.encoder_layers:
        both = replace(sizes, causal=False).config(mechanism, options)
        cross = installed().mechanisms.get("attn-variants/mha")
        stack.append(Layers(kind="encoder", number=model.encoder_layers, mechanism=mechanism, config=both))
        config = replace(sizes, num_kv_heads=None).config(cross, {"cross": True})
        stack.append(Layers(kind="cross", number=count, mechanism=cross, config=config))
    return stack
