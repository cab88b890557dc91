"""The commands about one mechanism: `attn show`, `attn explain` and `attn check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from attn_core import Mechanism, MechanismConfig, installed
from attn_core.computation import WholeCall
from attn_core.errors import Incompatible, InvalidValue, MissingPackage, how_to_install
from attn_core.kernels.rowwise import ROW_FORMS
from attn_core.options import parse_options
from attn_core.states import dtype_name
from attn_schema.device import DEVICES
from attn_schema.output import Json, note, print_json, print_rows, waiting

from attn_cli.equations import as_text as equation_text
from attn_cli.facts import (
    CACHE_FORMS,
    describe,
    padding_statement,
    paged_verdicts,
    price,
    recorded_steps,
    rowwise_verdicts,
    step_verdicts,
    verdicts,
    weights_statement,
)
from attn_cli.linear_layers import LINEAR, linear_verdicts
from attn_cli.options import (
    Bidirectional,
    Dtype,
    HeadDim,
    HiddenSize,
    MechanismName,
    NumHeads,
    NumKvHeads,
    Options,
    Sizes,
    supported_sizes,
)
from attn_cli.output import human_bytes, human_count, print_facts
from attn_cli.pictures import as_text, device_type, draw_grid, view_of

RECORDED = "cuda"
"""The type of the devices on which decode steps are recorded as CUDA graphs."""
PICTURE = 12
"""The number of query and key positions of the picture in text."""
DRAWN = 48
"""The number of query and key positions of the picture in a file."""


def show_command(
    name: MechanismName,
    hidden_size: HiddenSize = 512,
    num_heads: NumHeads = 8,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    bidirectional: Bidirectional = False,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length for the costs, in tokens.")] = 1024,
    dtype: Dtype = "float32",
    option: Options = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write its picture to a PNG, SVG or PDF.")
    ] = None,
    json: Json = False,
) -> None:
    """Show a mechanism: its description, states, costs, and the kernels that compute it.

    Sizes are those of one layer. The picture has a row per query and a column per key: it shows the mask, or, if the
    mechanism selects keys at run time or is not defined by a mask, an example: a layer with random weights and a random
    input, always the same. Without `--option` it uses options that show the mechanism with few tokens.
    """
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=not bidirectional,
    )
    fitted, given = supported_sizes(sizes, mechanism), parse_options(option)
    config, shown = fitted.config(mechanism, given), given or dict(mechanism.sketch)
    sketched = fitted.config(mechanism, shown)
    if draw is not None:
        draw_grid(view_of(mechanism, sketched, DRAWN, shown), mechanism.name, draw)
    kernels = verdicts(mechanism, config, WholeCall(dtype=dtype_name(dtype), tokens=seq))
    facts = describe(mechanism)
    facts["options"] = {name: getattr(config, name) for name in facts["options"]}
    facts |= {"padding": padding_statement(mechanism, config)}
    facts |= price(mechanism, config, seq, dtype)
    facts |= {"weights": weights_statement(mechanism), "kernels": kernels}
    if json:
        print_json(facts)
        return
    view = view_of(mechanism, sketched, PICTURE, shown)
    print_facts(readable(facts) | {"picture": f"{view.caption}\n{as_text(view.grid)}"})


def readable(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts in human-readable form."""
    shown = dict(facts) | {"equation": equation_text(facts["equation"])}
    for key in ("state_bytes_per_token", "state_bytes"):
        shown[key] = human_bytes(facts[key])
    for key in ("flops", "allowed_flops", "parameters"):
        shown[key] = human_count(facts[key])
    for key in ("used_by", "capabilities"):
        shown[key] = ", ".join(facts[key]) or "none"
    shown["states"] = "\n".join(map(_in_words, facts["states"])) or "none"
    shown["options"] = ", ".join(f"{name}={value}" for name, value in facts["options"].items()) or "none"
    shown["kernels"] = "\n".join(map(_verdict_line, facts["kernels"]))
    return shown


def _verdict_line(row: dict[str, Any]) -> str:
    reasons = f": {row['reasons']}" if row["reasons"] else ""
    return f"{row['part']}: {row['name']} {row['verdict']}{reasons}"


def _in_words(state: dict[str, Any]) -> str:
    rows = [f"{name} {row['shape']} {row['dtype']}" for name, row in state["fields"].items()]
    return f"{state['name']} ({state['kind']}): {', '.join(rows)}"


def explain_command(
    name: Annotated[
        str,
        typer.Argument(
            help=f"A mechanism (see `attn list mechanisms`), a row-wise operation ({', '.join(ROW_FORMS)}) or {LINEAR}."
        ),
    ],
    hidden_size: HiddenSize = 512,
    num_heads: NumHeads = 8,
    num_kv_heads: NumKvHeads = None,
    head_dim: HeadDim = None,
    bidirectional: Bidirectional = False,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length in tokens.")] = 1024,
    dtype: Dtype = "float32",
    device: Annotated[
        str,
        typer.Option(metavar=DEVICES.replace(", ", "|").replace(" or ", "|"), help="auto is a GPU if there is one."),
    ] = "cpu",
    training: Annotated[bool, typer.Option("--training", help="The call computes gradients.")] = False,
    padded: Annotated[
        bool, typer.Option("--padded", help="The batch is padded, as its sequences differ in length.")
    ] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="The batch concatenates documents without padding.")] = False,
    dropout: Annotated[bool, typer.Option("--dropout", help="Dropout of attention weights.")] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            help=f"Explain a serving step that reads KV cache rows of this form in place: {', '.join(CACHE_FORMS)}."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(help="The form of a row-wise operation, such as added or pairs, or the weight format of linear."),
    ] = None,
    outputs: Annotated[
        int | None, typer.Option(min=1, help="Output size of a linear layer; --hidden-size is its input size.")
    ] = None,
    option: Options = None,
    json: Json = False,
) -> None:
    """Show which kernel computes a mechanism here, and why each of the others refuses.

    Of the kernels that accept, the one with the least predicted cost runs; the cost is a fraction of the plain
    computation's time. Parts that the mechanism's own module computes are listed as such. Rows of the decode step show
    which kernel computes one token of each request with states of fixed size; the last rows, whether decode steps and
    steps with prompts can be recorded on a GPU as CUDA graphs, and if not, why.

    For a linear layer, rows are given for each --quantization with which a model has weights of the format --form (see
    `attn list linears`); --dtype is the type in which the model computes, and one kernel serves any number of rows.
    """
    device = device_type(device)
    if name == LINEAR:
        show(linear_verdicts(form, hidden_size, outputs, dtype=dtype_name(dtype), device=device), json=json)
        return
    if outputs is not None:
        raise InvalidValue.of("--outputs", outputs, f"only with {LINEAR}")
    if name in ROW_FORMS:
        known = {"dtype": dtype_name(dtype), "device": device, "gradients": training}
        show(rowwise_verdicts(name, hidden_size, form=form, **known), json=json)
        return
    mechanism = installed().mechanisms.get(name)
    sizes = Sizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        causal=not bidirectional,
    )
    config = sizes.config(mechanism, parse_options(option))
    call = WholeCall(
        dtype=dtype_name(dtype),
        device=device,
        gradients=training,
        padded=padded,
        varlen=varlen,
        dropout=dropout or (training and config.dropout > 0),
        tokens=seq,
    )
    found = whole_rows(mechanism, config, call) if rows is None else step_rows(mechanism, config, call, rows)
    show(found, json=json)


def whole_rows(mechanism: Mechanism, config: MechanismConfig, call: WholeCall) -> list[dict[str, Any]]:
    """The verdicts on a call over whole sequences, and, unless the call needs features that no step has, on decode
    steps: the kernel for states of fixed size, and whether steps with and without prompts are recorded."""
    found = verdicts(mechanism, config, call)
    if not beyond_a_step(call) and (config.causal or config.cross):
        found += step_verdicts(mechanism, config, call)
        found += recorded_steps(mechanism, config, dtype=call.dtype, device=RECORDED)
    if call.varlen and all(row["verdict"] != "runs" for row in found):
        note("no kernel here computes documents together: each is computed alone, as shown without --varlen")
    return found


def step_rows(mechanism: Mechanism, config: MechanismConfig, call: WholeCall, form: str) -> list[dict[str, Any]]:
    """The verdicts on a step that reads the rows of a KV cache of this form in place; raises `InvalidValue` for a call
    with features that no step has, `Incompatible` if the mechanism uses no kernel for such a step."""
    if beyond_a_step(call):
        allowed = "a serving step, without --training, --padded, --varlen and --dropout"
        raise InvalidValue.of("--rows", form, allowed)
    found = paged_verdicts(mechanism, config, dtype=call.dtype, device=call.device, rows=form)
    if not found:
        message = f"the steps of mechanism {mechanism.name!r} gather {form} rows: no kernel reads them in place"
        raise Incompatible(message, mechanism=mechanism.name)
    return found


def beyond_a_step(call: WholeCall) -> bool:
    """Whether a call needs features that no serving step has: gradients, padding, varlen or dropout."""
    return call.gradients or call.padded or call.varlen or call.dropout


def show(found: list[dict[str, Any]], *, json: bool) -> None:
    """Print the verdicts as a table or as JSON."""
    empty = f"no kernel is installed; {how_to_install('attn-variants')}"
    print_rows(found if json else [row | {"cost": _short(row["cost"])} for row in found], empty, json=json)


def _short(cost: float | None) -> str:
    return "" if cost is None else f"{cost:g}"


def check_command(
    name: MechanismName,
    option: Options = None,
    tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Length of the longest sequences; at least 26, by default as options need."),
    ] = None,
    every_case: Annotated[
        bool, typer.Option("--every-case", help="Check each law in every combination of modes, sizes and features.")
    ] = False,
    json: Json = False,
) -> None:
    """Check a mechanism against the laws of attention; exit code 1 if one is broken.

    The laws are those of the conformance kit: causality, padding, decoding equals the full computation, state
    bytes, cost, gradients and more, each in cases that together have every mode, size and feature. For a law that
    does not apply, the missing capability is shown. A law that holds for short sequences may fail for long ones:
    `--tokens 300` tests those.
    """
    try:
        from attn_testing import check
    except ModuleNotFoundError as error:
        raise MissingPackage.of("attn-testing", "attn check") from error
    longest = {} if tokens is None else {"tokens": tokens}
    with waiting(f"checking {name}"):
        results = check(installed().mechanisms.get(name), parse_options(option), every_case=every_case, **longest)
    rows = [
        {
            "law": result.law,
            "verdict": verdict(result.passed, result.applied),
            "says": result.summary if result.passed and result.applied else result.detail,
            "cases": result.detail if result.passed and result.applied else "",
        }
        for result in results
    ]
    print_rows(rows, "no law applies", json=json)
    if not all(result.passed for result in results if result.applied):
        raise typer.Exit(1)


def verdict(passed: bool, applied: bool) -> str:
    """The verdict on a law as a short text."""
    if not applied:
        return "not asked"
    return "kept" if passed else "BROKEN"
