"""Deployments that several gateways of one process share, as those on one Ray cluster do, without Ray."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from attn_engine.client import EngineClient
from attn_schema import DeploymentConfig, EngineConfig, ModelInfo
from local_replicas import LocalGroup


class LocalCluster:
    """The replicas of each model by name, and how often each was deployed."""

    def __init__(self) -> None:
        self.groups: dict[str, list[Any]] = {}
        self.deployed: Counter[str] = Counter()
        self.deploying = asyncio.Lock()

    def make(self, name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        return SharedGroup(self, name, folder, config, deployment)

    async def stop(self) -> None:
        """End what gateways left to others."""
        for servers in self.groups.values():
            await asyncio.gather(*(server.drain(0) for server in servers))


class SharedGroup(LocalGroup):
    """One gateway's client of a deployment."""

    def __init__(
        self, cluster: LocalCluster, name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig
    ) -> None:
        super().__init__(name, folder, config)
        self._cluster, self._deployment = cluster, deployment

    async def start(self) -> ModelInfo:
        async with self._cluster.deploying:
            joined = self._name in self._cluster.groups
            self.servers = self._cluster.groups.setdefault(self._name, [])
            if not joined:
                self._cluster.deployed[self._name] += 1
                await self.scale(self._deployment)
        self._loop = asyncio.get_running_loop()
        return await super().start()

    async def scale(self, deployment: DeploymentConfig) -> None:
        self._deployment = deployment
        while len(self.servers) < deployment.at_first:
            await self.add()
        while len(self.servers) > deployment.at_first:
            await self.servers.pop().drain(0)
        self._changed.set()

    def _is_deleted(self) -> bool:
        return self._name not in self._cluster.groups

    def _delete(self) -> None:
        if not self._deployed:
            return
        self._deployed = False
        for server in self._cluster.groups.pop(self._name, ()):
            asyncio.run_coroutine_threadsafe(server.drain(0), self._loop).result(30)
