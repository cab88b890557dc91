"""`attn check`."""

from __future__ import annotations

from typing import Annotated

import typer
from attn_core import installed
from attn_core.errors import MissingPackage
from attn_core.options import parse_options

from attn_cli.options import Options
from attn_cli.output import Json, print_json
from attn_cli.tables import print_table


def check_command(
    name: Annotated[str, typer.Argument(help="A mechanism; `attn list mechanisms` names them.")],
    option: Options = None,
    json: Json = False,
) -> None:
    """Check a mechanism against the laws of attention; exit code 1 if one is broken.

    The laws are those of the conformance kit: causality, padding, decoding equals the full computation, state
    bytes, cost, gradients and more. A law that does not apply says which capability is missing.
    """
    try:
        from attn_testing import check
    except ModuleNotFoundError as error:
        raise MissingPackage.of("attn-testing", "attn check") from error
    results = check(installed().mechanisms.get(name), parse_options(option))
    rows = [
        {
            "law": result.law,
            "verdict": verdict(result.passed, result.applied),
            "says": result.summary if result.passed and result.applied else result.detail,
            "cases": result.detail if result.passed and result.applied else "",
        }
        for result in results
    ]
    if json:
        print_json(rows)
    else:
        print_table(rows, "no law applies")
    if not all(result.passed for result in results if result.applied):
        raise typer.Exit(1)


def verdict(passed: bool, applied: bool) -> str:
    """What became of a law, in two words."""
    if not applied:
        return "not asked"
    return "kept" if passed else "BROKEN"
