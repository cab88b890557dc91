"""Inference as a service of the door."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import grpc.aio
from attn.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from attn.v1.model_pb2_grpc import add_ModelServiceServicer_to_server
from attn_gateway import Cluster

from attn_serve.engines import EngineClient, RayEngine
from attn_serve.fleet import Fleet
from attn_serve.requests import EngineSettings
from attn_serve.servicers.inference import InferenceServicer
from attn_serve.servicers.model import ModelServicer


class InferenceGrpc:
    """The inference and model services, with their engines as Ray actors."""

    names: Sequence[str] = ("attn.v1.InferenceService", "attn.v1.ModelService")

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.fleet = Fleet(cluster.home, self._engine)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add both servicers."""
        add_InferenceServiceServicer_to_server(InferenceServicer(self.fleet), server)
        add_ModelServiceServicer_to_server(ModelServicer(self.fleet), server)

    async def start(self) -> None:
        """Start Ray and load the models that were asked for at the start."""
        await self._cluster.start()
        models = self._cluster.models
        settings = _settings(self._cluster)
        await asyncio.gather(*(self.fleet.load(model.name, model.source, settings) for model in models))

    async def stop(self, grace: float) -> None:
        """Unload all models."""
        await self.fleet.stop(grace)

    def _engine(self, name: str, folder: Path, settings: EngineSettings) -> EngineClient:
        # Tenants are the server's, whoever loads a model.
        return RayEngine(name, folder, dataclasses.replace(settings, shares=self._cluster.settings.shares))


def _settings(cluster: Cluster) -> EngineSettings:
    options, default = cluster.settings, EngineSettings()
    return EngineSettings(
        weights=options.weights or default.weights,
        cache=options.cache or default.cache,
        guesses=options.guesses,
        draft=options.draft,
        offload_bytes=options.offload_bytes,
        branches=options.branches,
    )
