"""The entry point of the `attn` command."""

from __future__ import annotations

import sys

import typer
from attn_core.errors import AttnError, UserError

from attn_cli.lazy import PluginGroup

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
