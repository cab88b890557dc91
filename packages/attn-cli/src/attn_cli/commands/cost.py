"""`attn cost`."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from attn_core import ModelShape, Shape, installed, state_bytes
from attn_core.dtype import dtype_name

from attn_cli.options import Dtype, KeyValueHeads, Options, Sizes, parse_options
from attn_cli.output import Json, human_bytes, human_count, print_facts, print_json


def cost_command(
    shape: Annotated[str, typer.Argument(help="A known model; `attn list shapes` names them.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences at a time.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 1024,
    dtype: Dtype = "bfloat16",
    kv_heads: KeyValueHeads = None,
    attention: Annotated[str | None, typer.Option(help="Another mechanism than the model's own.")] = None,
    option: Options = None,
    json: Json = False,
) -> None:
    """Price attention at the size of a known model: cache, FLOPs and weights, before anything runs.

    Example: `attn cost llama-3-70b --batch 8 --seq 1000 --dtype bf16` says that its cache weighs 2.62 GB;
    with `--kv-heads 64`, as if it had no grouped heads, 20.97 GB.
    """
    model = installed().shapes.get(shape)
    facts = price(model, batch, seq, dtype_name(dtype), kv_heads, attention, parse_options(option))
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
    batch: int,
    seq: int,
    dtype: str,
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
    one = state_bytes(states, tokens=seq, source=seq, dtype=dtype)
    prefill = mechanism.cost(config, Shape(batch=batch, query=seq, key=seq))
    decode = mechanism.cost(config, Shape(batch=batch, query=1, key=seq))
    return {
        "shape": model.name,
        "attention": mechanism.name,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": config.key_value_heads or model.heads,
        "batch": batch,
        "seq": seq,
        "dtype": dtype,
        "cache_bytes": model.layers * batch * one,
        "cache_bytes_per_sequence": model.layers * one,
        "attention_parameters": model.layers * prefill.parameters,
        "prefill_flops": model.layers * prefill.allowed_flops,
        "decode_step_flops": model.layers * decode.allowed_flops,
    }
