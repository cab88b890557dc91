"""The plugin of attn-serve, which provides the inference and model services."""

from __future__ import annotations

from typing import Any

from attn_core.plugins.hooks import hookimpl


@hookimpl
def attn_services(cluster: Any) -> list[Any]:
    """The gRPC services for inference and for managing the served models."""
    from attn_serve.placement import EngineProcesses

    settings = cluster.settings
    alone = settings.models and not (settings.uses_ray or settings.deployment.deployed)
    # Before the imports below: meanwhile the process imports torch.
    processes = EngineProcesses((settings.models[0].engine or settings.engine) if alone else None)
    from attn_serve.service import InferenceGrpc

    return [InferenceGrpc(cluster, processes)]
