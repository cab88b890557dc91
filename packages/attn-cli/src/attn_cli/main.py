"""The `attn` command: its entry point, and the subcommands of plugins, each imported only when it is called."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Annotated, Any

import typer
from attn_core import installed
from attn_core.errors import AttnError, InvalidValue, UnknownName, UserError, how_to_install
from attn_core.plugins.hooks import Command
from attn_schema.output import Verbosity, detail, set_verbosity, verbosity
from typer.core import TyperCommand, TyperGroup

ELSEWHERE: dict[str, tuple[str, ...]] = {
    "attn-client": (
        *("bench", "chat", "embed", "generate", "jobs", "map", "models"),
        *("score", "top", "train", "translate"),
    ),
    "attn-experiments": ("attribute", "energy", "reproduce", "roofline", "worked"),
    "attn-engine": ("run", "transcribe"),
    "attn-models": ("convert", "pull", "tokenize"),
    "attn-serve": ("serve",),
    "attn-train": ("compare-training", "data", "evaluate"),
    "attn-variants": ("tune",),
}
"""The subcommands by the package that provides them; a test compares this with the packages."""

PANELS = 110
"""The least width, in characters, of a terminal whose help has panels: in narrower ones, they would cut off names."""


class CommandElsewhere(UnknownName):
    """The subcommand belongs to a package that is not installed."""

    @classmethod
    def for_command(cls, command: str) -> CommandElsewhere | None:
        """The error for `command`; None if no package of attn has such a command."""
        for package, commands in ELSEWHERE.items():
            if command in commands:
                message = f"the command {command!r} is in the package {package}, which is not installed here"
                return cls(f"{message}: {how_to_install(package)}", command=command, package=package)
        return None


class FlagCommand(TyperCommand):
    """A command whose options are all flags; the default of `--help` is False."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, with the default False."""
        return _off(super().get_help_option(ctx))


class FlagGroup(TyperGroup):
    """A group whose options are all flags; the default of `--help` is False."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, with the default False."""
        return _off(super().get_help_option(ctx))


def _off(option: Any) -> Any:
    if option is not None:
        option.default = False
    return option


class PluginGroup(FlagGroup):
    """The group of all plugins' subcommands: lists them by their summaries, and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 -- typer passes it
        """The names of all subcommands, sorted."""
        return installed().commands.names()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 -- typer passes it
        """A placeholder with the summary of a subcommand, for help; None for an unknown name."""
        try:
            command = installed().commands.get(cmd_name)
        except UnknownName:
            return None
        return FlagCommand(cmd_name, help=command.summary, callback=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The subcommand that is called; raises `CommandElsewhere` for one of a package that is not installed."""
        self.commands = dict.fromkeys(self.list_commands(ctx))  # type: ignore[assignment]
        if args and args[0] not in self.commands and (elsewhere := CommandElsewhere.for_command(args[0])):
            raise elsewhere
        name, command, rest = super().resolve_command(ctx, args)
        return name, load(installed().commands.get(args[0])) if command else None, rest


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
    _give_global_options(loaded)
    if shutil.get_terminal_size().columns < PANELS:
        _without_panels(loaded)
    return loaded


def _without_panels(command: Any) -> None:
    command.rich_markup_mode = None
    for inner in getattr(command, "commands", {}).values():
        _without_panels(inner)


def _give_global_options(command: Any) -> None:
    """Add `--quiet` and `--verbose` to a command, or to those of a group."""
    if within := getattr(command, "commands", None):
        for inner in within.values():
            _give_global_options(inner)
    if not within or command.invoke_without_command:
        command.params += _global_options()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"attn {version('attn-cli')} (attn-core {version('attn-core')}, Python {platform.python_version()})")
        for _, line in installed().offers("attn_versions"):
            print(line)
        raise typer.Exit


def _says(wanted: Verbosity) -> Callable[[bool], None]:
    """The callback of a flag that sets this verbosity; it raises `InvalidValue` if both flags are given."""

    def say(given: bool) -> None:
        if given and verbosity() not in (Verbosity.NORMAL, wanted):
            raise InvalidValue.of("--quiet, --verbose", "both", "one of them")
        if given:
            set_verbosity(wanted)

    return say


QUIET_HELP = "Print only errors on standard error."
VERBOSE_HELP = "Print more on standard error: measurements, the time taken, tracebacks of errors."
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help=QUIET_HELP, callback=_says(Verbosity.QUIET), is_eager=True, expose_value=False),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help=VERBOSE_HELP, callback=_says(Verbosity.VERBOSE), is_eager=True, expose_value=False
    ),
]


@cache
def _global_options() -> list[Any]:
    """The options that every subcommand has."""

    def own(quiet: Quiet = False, verbose: Verbose = False) -> None: ...

    app = typer.Typer(add_completion=False)
    app.command()(own)
    return list(typer.main.get_command(app).params)


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Define the options of `attn` itself."""


def application() -> typer.Typer:
    """Create the command line for the arguments in `sys.argv`.

    The options that install shell completion are left out if a subcommand is called: Typer starts slower with them.
    """
    completes = "_ATTN_COMPLETE" in os.environ or not sys.argv[1:] or sys.argv[1].startswith("-")
    app = typer.Typer(
        cls=PluginGroup,
        add_completion=completes,
        no_args_is_help=True,
        rich_markup_mode="markdown",
        help="Attention mechanisms, from equation to endpoint. Every subcommand explains itself with `--help`.",
    )
    app.callback()(root)
    return app


def main() -> None:
    """Run the command line. An `AttnError` prints one line on stderr.

    The exit code is 2 for a `UserError`, 1 for any other `AttnError`, and 130 for Ctrl-C.
    """
    began = time.perf_counter()
    set_verbosity(Verbosity.NORMAL)
    if sys.argv[1:2] == [
        "check"
    ]:  # It ends soon, and looking for garbage among a compiler's objects takes half a second.
        gc.disable()
    try:
        application()()
    except KeyboardInterrupt:
        sys.exit(130)
    except AttnError as error:
        if verbosity() >= Verbosity.VERBOSE:
            traceback.print_exc()
        print(f"attn: {error.message}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        # The reader of the output has closed it, as in `attn list mechanisms | head -1`.
        sys.stderr.close()
        sys.exit(141)
    finally:
        detail(f"attn: {time.perf_counter() - began:.2f} s")
