"""The `attn` command: its entry point, and the subcommands of plugins, each imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from attn_core import installed
from attn_core.errors import AttnError, UnknownName, UserError
from attn_core.plugins.hooks import Command
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


class PluginGroup(FlagGroup):
    """Lists what plugins offer from their summaries alone, and imports the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 -- typer passes it
        """The names of all subcommands, sorted."""
        return installed().commands.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The subcommand called `cmd_name`; a placeholder with its summary while only help is shown."""
        try:
            command = installed().commands.get(cmd_name)
        except UnknownName:
            return None
        if ctx.invoked_subcommand is None and cmd_name not in sys.argv[1:]:
            return FlagCommand(cmd_name, help=command.summary, callback=None)
        return load(command)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Near names for an unknown subcommand come from the plugins."""
        self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment]
        return super().resolve_command(ctx, args)


def load(command: Command) -> Any:
    """The click command behind `command.target`, "module:attribute": a Typer app or a plain function."""
    module, _, attribute = command.target.partition(":")
    target = getattr(importlib.import_module(module), attribute)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        app.command(name=command.name)(target)
        target = app
    loaded = typer.main.get_command(target)
    loaded.name = command.name
    return loaded


app = typer.Typer(
    cls=PluginGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Attention mechanisms, from equation to endpoint. Every subcommand explains itself with `--help`.",
)


@app.callback()
def root() -> None:
    """Give the group its options."""


def main() -> None:
    """Run the command line; users' errors are one line on stderr and exit code 2, others 1, Ctrl-C 130."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except AttnError as error:
        print(f"attn: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        # The reader of our output has gone, as with `attn list mechanisms | head -1`.
        sys.stderr.close()
        sys.exit(141)
