"""The health of the server, of each service, and of each model: `attn.v1.InferenceService/NAME`.

Probes have no token, so only models that are available to all tenants are reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from attn_gateway.grpc_edge import Context

POLL_SECONDS = 0.5

Status = health_pb2.HealthCheckResponse


@runtime_checkable
class HasModels(Protocol):
    """A service whose models have a health of their own."""

    @property
    def names(self) -> Sequence[str]:
        """The full names of its gRPC services."""
        ...

    def model_serves(self, name: str) -> bool | None:
        """Whether the model of this name that all tenants may use serves; None if there is none."""
        ...


class Health(health_aio.HealthServicer):
    """The health service of gRPC, extended by the health of models."""

    def __init__(self, services: Sequence[Any]) -> None:
        super().__init__()
        self._owners = {
            name: service for service in services if isinstance(service, HasModels) for name in service.names
        }

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:  # noqa: N802
        """Return the status of a service or model; NOT_FOUND for an unknown one."""
        if not self._is_model(request.service):
            return await super().Check(request, context)
        status = self._status(request.service)
        if status == Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such model")
        return Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:  # noqa: N802
        """Stream the status of a service or model: now, and whenever it changes."""
        if not self._is_model(request.service):
            await super().Watch(request, context)
            return
        last_status = None
        while True:
            status = self._status(request.service)
            if status != last_status:
                last_status = status
                await context.write(Status(status=status))
            await asyncio.sleep(POLL_SECONDS)

    def _is_model(self, name: str) -> bool:
        service, slash, _ = name.partition("/")
        return bool(slash) and service in self._owners

    def _status(self, name: str) -> Any:
        service, _, model = name.partition("/")
        serves = self._owners[service].model_serves(model)
        if serves is None:
            return Status.SERVICE_UNKNOWN
        return Status.SERVING if serves else Status.NOT_SERVING
