"""The plugin of attn-openai, which provides the HTTP server of a gateway."""

from __future__ import annotations

from typing import Any

from attn_core.plugins.hooks import hookimpl


@hookimpl
def attn_http_servers() -> list[Any]:
    """The HTTP server that `attn serve --http-port` opens."""
    from attn_openai.server import UvicornServer

    return [UvicornServer()]
