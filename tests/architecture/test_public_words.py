"""Flags, fields of the wire and exported names use the words of the field, not those of public_words.toml."""

from __future__ import annotations

import importlib
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import attn.v1
import pytest
import workspace
from attn_cli.main import load
from attn_core import installed

WORDS = tomllib.loads(Path(__file__).with_name("public_words.toml").read_text("utf-8"))


def parts(name: str) -> list[str]:
    """The words of a name in snake, kebab or camel case, in lower case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [part for part in re.split(r"[^a-z0-9]+", spaced.lower()) if part]


def better(name: str) -> str | None:
    """What to say in place of a name, or None where it may be said."""
    words = parts(name)
    whole: str | None = WORDS["whole"].get("_".join(words))
    return whole or next((WORDS["anywhere"][word] for word in words if word in WORDS["anywhere"]), None)


def options_of(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """(where and what, name) of every option and argument of a command and of those below it."""
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            shown = option if option.startswith("-") else option.upper()
            yield f"{path} {shown}", option
    for name, below in getattr(command, "commands", {}).items():
        yield from options_of(below, f"{path} {name}")


def flags() -> Iterator[tuple[str, str]]:
    """Those of every subcommand of `attn`."""
    commands = installed().commands
    for name in commands.names():
        yield from options_of(load(commands.get(name)), name)


def fields() -> Iterator[tuple[str, str]]:
    """Messages, their fields and enums of the wire format."""
    for module in pkgutil.iter_modules(attn.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"attn.v1.{module.name}").DESCRIPTOR
            for enum in file.enum_types_by_name:
                yield f"attn.v1 {enum}", enum
            for message in file.message_types_by_name.values():
                yield f"attn.v1 {message.name}", message.name
                for field in message.fields:
                    yield f"attn.v1 {message.name}.{field.name}", field.name


def exports() -> Iterator[tuple[str, str]]:
    """The names that the packages export at their roots."""
    for package in workspace.packages().values():
        for root in package.imports:
            for name in getattr(importlib.import_module(root), "__all__", ()):
                yield f"{root} {name}", name


@cache
def found() -> dict[str, str]:
    """Public names with a word of the list, and what to say in its place."""
    surface = [*flags(), *fields(), *exports()]
    return {where: said for where, name in surface if (said := better(name)) is not None}


def test_public_names_are_words_of_the_field() -> None:
    wrong = {where: said for where, said in found().items() if where not in WORDS["kept"]}
    assert not wrong, "\n".join(f"{where}: say {said}" for where, said in sorted(wrong.items()))


def test_what_is_excused_is_still_there() -> None:
    gone = sorted(set(WORDS["kept"]) - set(found()))
    assert not gone, f"renamed or removed; take these lines out of public_words.toml: {gone}"


@pytest.mark.parametrize("name", ["--kv-heads", "guesses", "KVLender", "OperandsOfRows", "grace_seconds", "Grammar"])
def test_a_word_of_the_list_is_found_in_any_spelling(name: str) -> None:
    assert better(name)


@pytest.mark.parametrize(
    "name", ["--num-kv-heads", "hidden_size", "Heads2", "kv_cache", "draft_model", "ScheduledChunk"]
)
def test_other_names_with_a_part_of_it_may_be_said(name: str) -> None:
    assert better(name) is None
