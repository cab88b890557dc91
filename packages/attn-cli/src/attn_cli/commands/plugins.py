"""`attn plugins`."""

from __future__ import annotations

from attn_cli.commands.list import print_rows
from attn_cli.output import Json


def plugins_command(json: Json = False) -> None:
    """List every plugin found, and why one did not load.

    A plugin that raises, exits, lacks a dependency or was built for another core is listed with its reason and
    harms no other. `ATTN_PLUGINS=attn-variants,attn-cli attn ...` loads only the packages named.
    """
    print_rows("plugins", json)
