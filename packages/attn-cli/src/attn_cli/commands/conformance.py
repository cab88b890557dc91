"""`attn conformance`: the laws of attention, asked of other packages' implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attn_core.errors import InvalidValue, MissingPackage
from attn_core.options import parse_options
from attn_schema.output import Json, note, print_rows

from attn_cli.commands.mechanisms import verdict
from attn_cli.options import Bidirectional, Options


def conformance_command(
    objects: Annotated[list[str], typer.Argument(metavar="PACKAGE:OBJECT...", help="Modules, classes or functions.")],
    option: Options = None,
    padding: Annotated[
        str | None,
        typer.Option(metavar="NAME=FORM", help="Argument for padding; drop or keep where it is True, or ones to keep."),
    ] = None,
    bidirectional: Bidirectional = False,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdicts to this file, as a table in Markdown.")
    ] = None,
    json: Json = False,
) -> None:
    """Check attention of other packages against the laws of attention; exit code 1 if one is broken.

    An object is a torch module, a class of one, or a function of queries, keys and values, such as
    `torch.nn.functional:scaled_dot_product_attention`. It is imported and run in this process: name only what you
    trust. The options go to the constructor of a class, or to each call of a function.
    """
    try:
        from attn_testing.foreign import examine, markdown
    except ModuleNotFoundError as error:
        raise MissingPackage.of("attn-testing", "attn conformance") from error
    name, equals, form = (padding or "").partition("=")
    if padding is not None and not (name and equals and form):
        raise InvalidValue.of("--padding", padding, "NAME=drop, NAME=keep or NAME=ones")
    given = (name, form) if padding is not None else None
    found = [
        examine(target, options=parse_options(option), causal=not bidirectional, padding=given) for target in objects
    ]
    rows = [
        {
            "object": one.name,
            "package": one.package,
            "law": result.law,
            "verdict": verdict(result.passed, result.applied),
            "says": result.summary if result.passed and result.applied else result.detail,
        }
        for one in found
        for result in one.results
    ]
    print_rows(rows, "no law applies", json=json)
    if write is not None:
        write.write_text(markdown(found), encoding="utf-8")
        note(f"wrote {write}")
    if any(result.applied and not result.passed for one in found for result in one.results):
        raise typer.Exit(1)
