"""Completions on the terminal."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable

import typer

from attn_client.commands.options import print_line
from attn_client.results.inference import Chunk


def show(chunks: Iterable[Chunk], *, json: bool, several: bool) -> None:
    """Print a completion as it is made, or each of several once it is whole; as JSON, every chunk as it comes."""
    if json:
        for chunk in chunks:
            print_line(dataclasses.asdict(chunk))
    elif several:
        _show_whole(chunks)
    else:
        for chunk in chunks:
            typer.echo(chunk.text, nl=False)
            sys.stdout.flush()
        typer.echo()


def _show_whole(chunks: Iterable[Chunk]) -> None:
    """Completions that are made side by side, one after the other, under their numbers."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
        if chunk.finish_reason is not None:
            typer.echo(f"--- {chunk.choice}\n{texts.pop(chunk.choice)}")
