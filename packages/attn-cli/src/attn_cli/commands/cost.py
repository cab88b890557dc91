"""`attn cost`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer
from attn_core import ModelShape, Shape, StateSpecs, installed, state_bytes
from attn_core.dtype import dtype_name

from attn_cli.options import Dtype, KeyValueHeads, Options, Sizes, parse_options
from attn_cli.output import Json, human_bytes, human_count, print_facts, print_json


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`batch` sequences of `seq` tokens in element type `dtype`, their states kept as `cache` keeps them."""

    batch: int
    seq: int
    dtype: str
    cache: str | None

    def state_bytes(self, states: StateSpecs) -> int:
        """Bytes of the states of one layer and one sequence; without a cache's name as they are."""
        if self.cache is None:
            return state_bytes(states, tokens=self.seq, source=self.seq, dtype=self.dtype)
        family = installed().caches.get(self.cache)
        return family.bytes({"layer": states}, tokens=self.seq, source=self.seq, dtype=self.dtype)


def cost_command(
    shape: Annotated[str, typer.Argument(help="A known model; `attn list shapes` names them.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 1024,
    dtype: Dtype = "bfloat16",
    kv_heads: KeyValueHeads = None,
    attention: Annotated[str | None, typer.Option(help="Another mechanism than the model's own.")] = None,
    cache: Annotated[str | None, typer.Option(help="How states are kept; see `attn list caches`.")] = None,
    option: Options = None,
    json: Json = False,
) -> None:
    """Price attention at the size of a known model: cache, FLOPs and weights, before anything runs.

    Example: `attn cost llama-3-70b --batch 8 --seq 1000 --dtype bf16` says that its cache weighs 2.62 GB;
    with `--kv-heads 64`, as if it had no grouped heads, 20.97 GB; with `--cache int8`, 1.33 GB.
    """
    model = installed().shapes.get(shape)
    work = Workload(batch=batch, seq=seq, dtype=dtype_name(dtype), cache=cache)
    facts = price(model, work, kv_heads, attention, parse_options(option))
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


def price(
    model: ModelShape,
    work: Workload,
    kv_heads: int | None,
    attention: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The prices of all attention layers together; FLOPs count only the pairs that the mask allows."""
    mechanism = installed().mechanisms.get(attention or model.mechanism)
    chosen = options if attention else {**(model.options or {}), **options}
    sizes = Sizes(
        width=model.width,
        heads=model.heads,
        key_value_heads=kv_heads or (None if attention else model.key_value_heads),
        head_size=model.head_size,
    )
    config = sizes.config(mechanism, chosen)
    states = mechanism.state(config)
    one = work.state_bytes(states)
    prefill = mechanism.cost(config, Shape(batch=work.batch, query=work.seq, key=work.seq))
    decode = mechanism.cost(config, Shape(batch=work.batch, query=1, key=work.seq))
    facts = {
        "shape": model.name,
        "attention": mechanism.name,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": config.key_value_heads or model.heads,
        "batch": work.batch,
        "seq": work.seq,
        "dtype": work.dtype,
        "cache_bytes": model.layers * work.batch * one,
        "cache_bytes_per_sequence": model.layers * one,
        "attention_parameters": model.layers * prefill.parameters,
        "prefill_flops": model.layers * prefill.allowed_flops,
        "decode_step_flops": model.layers * decode.allowed_flops,
    }
    return facts if work.cache is None else {"cache": work.cache, **facts}
