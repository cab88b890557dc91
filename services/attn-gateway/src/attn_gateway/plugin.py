"""The plugin of attn-gateway: the command `attn serve`, and the catalogue service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.plugins.hooks import Command, hookimpl

if TYPE_CHECKING:
    from attn_gateway.service import Service


@hookimpl
def attn_commands() -> list[Command]:
    """The command `attn serve`."""
    target = "attn_gateway.command:serve_command"
    return [Command(name="serve", summary="Serve mechanisms, models and training jobs over gRPC.", target=target)]


@hookimpl
def attn_services() -> list[Service]:
    """The catalogue service."""
    from attn_gateway.catalog import CatalogService

    return [CatalogService()]
