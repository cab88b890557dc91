"""Commands whose options are flags, which Typer reads without the library that it checks other types with.

Typer imports pydantic, a sixth of a second, for an option without a value; its own `--help` is one.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class FlagCommand(TyperCommand):
    """A command of flags only."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, off unless it is given."""
        return _off(super().get_help_option(ctx))


class FlagGroup(TyperGroup):
    """A group of flags only."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, off unless it is given."""
        return _off(super().get_help_option(ctx))


def _off(option: Any) -> Any:
    if option is not None:
        option.default = False
    return option
