"""`attn worked`: a small computation of a mechanism, number by number."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from attn_core import installed
from attn_core.options import parse_options
from attn_schema.output import Json, print_json
from torch import Tensor

from attn_experiments.worked.examples import read_rows, worked
from attn_experiments.worked.steps import Step


def worked_command(
    *,
    name: Annotated[str, typer.Argument(help="Name of a mechanism; see `attn list mechanisms`.")],
    x: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The inputs: a row for each token, numbers and spaces.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Mask later tokens, also where the mechanism can be without a mask.")
    ] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="NAME=VALUE", help="An option of the mechanism; may be repeated."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of numbers that are drawn: tokens beyond three, and a source.")] = 0,
    digits: Annotated[int, typer.Option(min=0, max=15, help="Digits after the point.")] = 4,
    json: Json = False,
) -> None:
    """Compute a small example of a mechanism, number by number: inputs, weights, queries, keys, scores, mask, output.

    The inputs are three tokens of a well-known course and, where they fit, its matrices: `attn worked dot` gives its
    1.9366, 6.6831 and 1.5951. Other weights are drawn and rounded. Every number is that of the layer.

    Examples: `attn worked mha --causal`, `attn worked sliding_window`, `attn worked retnet --x tokens.txt`
    """
    mechanism = installed().mechanisms.get(name)
    rows = None if x is None else read_rows(x)
    example = worked(mechanism, parse_options(option), rows=rows, causal=causal, seed=seed)
    if json:
        steps = [{"name": s.name, "says": s.says, "values": s.values.tolist()} for s in example.steps]
        print_json({"mechanism": mechanism.name, "steps": steps})
        return
    typer.echo("\n\n".join(text_of(step, digits) for step in example.steps))


def text_of(step: Step, digits: int) -> str:
    """A step as text: its name and what it says, and the matrix, or one for each head."""
    matrices = step.values[None] if step.values.ndim == 2 else step.values
    blocks = []
    for head, matrix in enumerate(matrices):
        title = [f"head {head}"] if len(matrices) > 1 else []
        blocks.append("\n".join([*title, *lines_of(matrix, digits)]))
    return "\n".join([f"{step.name}  ({step.says})", *blocks])


def lines_of(matrix: Tensor, digits: int) -> list[str]:
    """The rows of a matrix, with columns aligned; of a mask, with the keys that each query sees."""
    if matrix.dtype.is_floating_point:
        cells = [[written(value, digits) for value in row] for row in matrix.tolist()]
        width = max((len(cell) for row in cells for cell in row), default=1)
        return ["  " + "  ".join(cell.rjust(width) for cell in row) for row in cells]
    drawn = [" ".join("■" if seen else "·" for seen in row) for row in matrix.tolist()]
    keys = [", ".join(str(key) for key, seen in enumerate(row) if seen) for row in matrix.tolist()]
    return [f"  {row}   {query}: {seen or 'none'}" for query, (row, seen) in enumerate(zip(drawn, keys, strict=True))]


def written(value: float, digits: int) -> str:
    """A number with at most so many digits after the point, and zero without a sign."""
    text = f"{value:z.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text
