"""Replicas of a model in this process, behind real connections and without Ray: what a test stops is gone at once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from attn_gateway import ReplicaTls
from attn_schema import DeploymentConfig, EngineConfig
from attn_serve.disaggregation import DisaggregatedReplicas
from attn_serve.engine_server import EngineServer
from attn_serve.replica_messages import ReplicaAddress
from attn_serve.replicas import Replicas


def signed(folder: Path, name: str) -> ReplicaTls:
    """A certificate for replicas and gateways, by an authority of its own."""
    folder.mkdir()
    key, asked, made, authority, secret = (folder / part for part in ("key", "asked", "cert", "ca", "ca-key"))
    (folder / "names").write_text(f"subjectAltName=DNS:{name}\n")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj"
    for command in (
        f"req -x509 {new} /CN=authority -days 1 -keyout {secret} -out {authority}",
        f"req {new} /CN=replica -keyout {key} -out {asked}",
        f"x509 -req -in {asked} -CA {authority} -CAkey {secret} -days 1 -out {made} -extfile {folder / 'names'}",
    ):
        subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
    return ReplicaTls(certificate=made, key=key, authority=authority)


class LocalGroup(Replicas):
    """The replicas that a test starts and stops, in place of those that Ray Serve does."""

    def __init__(self, name: str, folder: Path, config: EngineConfig, tls: ReplicaTls | None = None) -> None:
        super().__init__(name, folder, config, DeploymentConfig(replicas=1), tls)
        self.servers: list[EngineServer] = []
        self.model = "the same"

    async def add(self) -> EngineServer:
        folder, config, model = self._folder, self._config, self.model
        server = EngineServer(folder, config, None, self._tls, model)
        await server.start("127.0.0.1")
        self.servers.append(server)
        self._changed.set()
        return server

    async def kill(self, server: EngineServer) -> None:
        """End a replica as a kill does: connections break, and nobody is told anything."""
        self.servers.remove(server)
        await server._server.stop(grace=None)
        await server.engine.stop(0.0)

    def require_places(self, deployment: DeploymentConfig) -> None:
        """There is room."""

    def _deploy(self) -> Any:
        return self

    def _is_deleted(self) -> bool:
        return False

    def _delete(self) -> None:
        pass

    async def _addresses(self) -> list[ReplicaAddress]:
        return [address for server in self.servers if (address := server.address_now()) is not None]


class LocalReplicas:
    """Prefill and decode replicas of one model, and a client of both. As a context manager it ends them."""

    def __init__(
        self, folder: Path, config: EngineConfig, tls: ReplicaTls | None = None, least: int = 8, *, decode: int = 1
    ) -> None:
        self.prefill, self.decode = (LocalGroup(name, folder, config, tls) for name in ("prefill", "decode"))
        deployment = DeploymentConfig(replicas=decode, prefill_replicas=1, prefill_min_tokens=least)
        self.engine = DisaggregatedReplicas(self.prefill, self.decode, deployment)
        self._decode = decode

    async def __aenter__(self) -> LocalReplicas:
        await self.prefill.add()
        for _ in range(self._decode):
            await self.decode.add()
        await self.engine.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.engine.stop(0)
        for server in (*self.prefill.servers, *self.decode.servers):
            await server.drain(0)

    def imported(self) -> int:
        """Tokens whose states decode replicas got."""
        return sum(server.engine.host.stats().imported_tokens for server in self.decode.servers)

    def nothing_left(self) -> bool:
        """Whether no replica holds or computes anything of any request."""
        servers = (*self.prefill.servers, *self.decode.servers)
        stats = [server.engine.host.stats() for server in servers]
        busy = sum(one.running + one.waiting + one.kv_tokens_used + one.offloaded_bytes for one in stats)
        held = sum(server.states.budget.held + server.fetched.held for server in servers)
        open_tasks = sum(len(session.tasks) for server in servers for session in server._sessions.values())
        return busy + held + open_tasks + len(self.engine.streams) == 0
