"""What the gateway offers to attn: the command that serves, and the catalogue as a service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core.plugins.hooks import Command, hookimpl

if TYPE_CHECKING:
    from attn_gateway.service import GrpcService


@hookimpl
def attn_commands() -> list[Command]:
    """`attn serve`."""
    target = "attn_gateway.command:serve_command"
    return [Command(name="serve", summary="Serve mechanisms, models and training jobs over gRPC.", target=target)]


@hookimpl
def attn_services() -> list[GrpcService]:
    """The catalogue."""
    from attn_gateway.catalog import CatalogGrpc

    return [CatalogGrpc()]
