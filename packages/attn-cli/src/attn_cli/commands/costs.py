"""What attention costs before anything runs: `attn compare`, `attn cost`."""

from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from attn_core import Cost, Shape, StateSpecs, installed, state_bytes
from attn_core.errors import InvalidValue
from attn_core.models import KvSharing, ModelShape, checked_kv_sharing, kv_source_layer_of
from attn_core.options import parse_options
from attn_core.states import dtype_name
from attn_schema.output import print_table

from attn_cli.facts import price
from attn_cli.options import Bidirectional, Dtype, HeadDim, HiddenSize, NumHeads, NumKvHeads, Options, Sizes, fitting
from attn_cli.output import Json, human_bytes, human_count, print_facts, print_json
from attn_cli.pictures import draw_curves

CURVES = {"allowed flops": "FLOPs of a forward pass", "state bytes": "bytes remembered"}
COUNTS = {"weights": "parameters", "flops": "flops", "allowed": "allowed flops"}
SIZES = {"state": "state bytes", "a token": "state bytes per token"}


def compare_command(
    names: Annotated[list[str], typer.Argument(help="Mechanisms; `attn list mechanisms` names them.")],
    seq: Annotated[str, typer.Option(metavar="N,N,...", help="Sequence lengths to price.")] = "1024,4096,16384",
    hidden_size: HiddenSize = 512,
    num_heads: NumHeads = 8,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    bidirectional: Bidirectional = False,
    dtype: Dtype = "float32",
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the curves: PNG, SVG or PDF.")] = None,
    json: Json = False,
) -> None:
    """Compare what mechanisms cost and remember as sequences grow, one layer each, side by side.

    Example: `attn compare mha sliding_window linear --seq 1024,16384 --draw curves.png`. Key/value heads are given
    only to mechanisms that can share them; a mechanism without a causal form is priced bidirectional.
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


def priced(names: list[str], sizes: Sizes, lengths: list[int], dtype: str) -> list[dict[str, Any]]:
    """A row for each mechanism and length."""
    return [row(name, sizes, length, dtype) for name in dict.fromkeys(names) for length in lengths]


def row(name: str, sizes: Sizes, length: int, dtype: str) -> dict[str, Any]:
    """The price of one mechanism at one length."""
    mechanism = installed().mechanisms.get(name)
    fitted = fitting(sizes, mechanism)
    try:
        facts = price(mechanism, fitted.config(mechanism, {}), length, dtype)
    except InvalidValue as error:
        # Such as multi-query attention, which takes one key/value head and no other number.
        if fitted.num_kv_heads is None or error.metadata.get("field") != "num_kv_heads":
            raise
        own = dataclasses.replace(fitted, num_kv_heads=None)
        facts = price(mechanism, own.config(mechanism, {}), length, dtype)
    kept = ("tokens", "parameters", "flops", "allowed flops", "state bytes", "state bytes per token")
    return {"name": name} | {key: facts[key] for key in kept}


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Title of a panel -> mechanism -> values by length."""
    panels: dict[str, dict[str, list[float]]] = {}
    for key, title in CURVES.items():
        for facts in rows:
            panels.setdefault(title, {}).setdefault(facts["name"], []).append(facts[key])
    return panels


def comparison(facts: dict[str, Any]) -> dict[str, Any]:
    """The row as people read it, in a screen's width."""
    counted = {short: human_count(facts[key]) for short, key in COUNTS.items()}
    sized = {short: human_bytes(facts[key]) for short, key in SIZES.items()}
    return {"name": facts["name"], "tokens": facts["tokens"]} | counted | sized


def with_powers_of_two(lengths: list[int]) -> list[int]:
    """The lengths and the powers of two between them, so that a curve bends where its mechanism's price does."""
    powers = [2**power for power in range(lengths[0].bit_length(), lengths[-1].bit_length())]
    return sorted({*lengths, *(power for power in powers if power < lengths[-1])})


def parse_lengths(text: str) -> list[int]:
    """Ascending lengths of "1024,4096"; raises `InvalidValue`."""
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = [0]
    if lengths[0] < 1:
        raise InvalidValue.of("--seq", text, "whole numbers from 1, with commas between them")
    return lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch` sequences of `seq` tokens in element type `dtype`, their states kept as `kv_cache` keeps them."""

    batch: int
    seq: int
    dtype: str
    kv_cache: str | None

    def state_bytes(self, states: StateSpecs) -> int:
        """Bytes of the states of one layer and one sequence; without a cache's name as they are."""
        if self.kv_cache is None:
            return state_bytes(states, tokens=self.seq, source=self.seq, dtype=self.dtype)
        family = installed().caches.get(self.kv_cache)
        return family.bytes({"layer": states}, tokens=self.seq, source=self.seq, dtype=self.dtype)


class Attention(NamedTuple):
    """What was asked for in place of the model's own; None is that."""

    name: str | None
    options: dict[str, Any]


def cost_command(
    shape: Annotated[str, typer.Argument(help="A known model; `attn list shapes` names them.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 1024,
    dtype: Dtype = "bfloat16",
    num_kv_heads: NumKvHeads = None,
    attention: Annotated[str | None, typer.Option(help="Another mechanism than the model's own.")] = None,
    kv_cache: Annotated[
        str | None, typer.Option(help="The cache that keeps the states; `attn list caches` names them.")
    ] = None,
    option: Options = None,
    kv_sharing: Annotated[
        str, typer.Option(help="Layers that share keys and values: cla:N, N neighbours; yoco, the upper half.")
    ] = "",
    json: Json = False,
) -> None:
    """Price attention at the size of a known model: cache, FLOPs and weights, before anything runs.

    Example: `attn cost llama-3-70b --batch 8 --seq 1000 --dtype bf16` says that its cache weighs 2.62 GB; with
    `--num-kv-heads 64`, as if it had no grouped heads, 20.97 GB; with `--kv-cache int8`, 1.33 GB; with
    `--kv-sharing cla:2`, 1.31 GB.
    """
    model = installed().shapes.get(shape)
    work = Workload(batch=batch, seq=seq, dtype=dtype_name(dtype), kv_cache=kv_cache)
    shared = checked_kv_sharing(kv_sharing or (), model.num_layers)
    facts = attention_costs(model, work, num_kv_heads, Attention(attention, parse_options(option)), shared)
    if json:
        print_json(facts)
        return
    readable: dict[str, Any] = {}
    for key, value in facts.items():
        words = key.replace("_", " ")
        if "bytes" in key:
            readable[words.replace("bytes", "size")] = f"{human_bytes(value)} ({value} bytes)"
        elif "flops" in key or "parameters" in key:
            readable[words] = human_count(value)
        else:
            readable[words] = value
    print_facts(readable)


def attention_costs(
    model: ModelShape,
    work: Workload,
    num_kv_heads: int | None,
    attention: Attention,
    kv_sharing: KvSharing,
) -> dict[str, Any]:
    """The prices of all attention layers together; FLOPs count only the pairs that the mask allows."""
    mechanism = installed().mechanisms.get(attention.name or model.mechanism)
    chosen = attention.options if attention.name else {**(model.options or {}), **attention.options}
    sizes = Sizes(
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=num_kv_heads or (None if attention.name else model.num_kv_heads),
        head_dim=model.head_dim,
    )
    config = sizes.config(mechanism, chosen)
    own = sum(kv_source_layer_of(kv_sharing, layer, model.num_layers) == layer for layer in range(model.num_layers))
    stack = [(own, config)]
    if own < model.num_layers:
        stack.append((model.num_layers - own, replace(sizes, shares_kv=True).config(mechanism, chosen)))

    def cost(query: int) -> Cost:
        """Of all layers for so many queries."""
        shape = Shape(batch=work.batch, query=query, key=work.seq)
        prices = [mechanism.cost(kind, shape) for number, kind in stack for _ in range(number)]
        return functools.reduce(operator.add, prices)

    prefill, decode = cost(work.seq), cost(1)
    one = own * work.state_bytes(mechanism.state(config))
    facts = {
        "shape": model.name,
        "attention": mechanism.name,
        "num_layers": model.num_layers,
        "layers_with_own_keys": own,
        "num_heads": model.num_heads,
        "num_kv_heads": config.num_kv_heads or model.num_heads,
        "batch": work.batch,
        "seq": work.seq,
        "dtype": work.dtype,
        "cache_bytes": work.batch * one,
        "cache_bytes_per_sequence": one,
        "attention_parameters": prefill.parameters,
        "prefill_flops": prefill.allowed_flops,
        "decode_step_flops": decode.allowed_flops,
    }
    if attention.name is None and num_kv_heads is None and model.parameters is not None and not kv_sharing:
        facts["model_parameters"] = model.parameters
        facts["active_parameters"] = model.active_parameters or model.parameters
    return facts if work.kv_cache is None else {"kv_cache": work.kv_cache, **facts}
