"""What attn-serve offers: the inference and model services."""

from __future__ import annotations

from typing import Any

from attn_core.plugins.hooks import hookimpl


@hookimpl
def attn_services(cluster: Any) -> list[Any]:
    """The gRPC services of inference and of the models that are served."""
    from attn_serve.service import InferenceGrpc

    return [InferenceGrpc(cluster)]
