"""A server with one service that runs on Ray; the tests interrupt it."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

from attn_gateway import Cluster, ClusterSettings, Gateway, GatewaySettings
from attn_gateway.serve import ServeSettings, serve


class OnRay:
    """Holds an actor."""

    names = ("attn.v1.TrainingService",)

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def handlers(self) -> Any:
        return {}

    async def start(self) -> None:
        await self.cluster.start()
        import ray

        @ray.remote(num_cpus=0)
        class Sleeper:
            def ping(self) -> int:
                return 1

        self.actor = Sleeper.remote()
        await self.actor.ping.remote()

    async def stop(self, shutdown_timeout: float) -> None: ...


def announce(gateway: Gateway) -> None:
    print("ready", gateway.address, flush=True)


settings = ServeSettings(
    gateway=GatewaySettings(port=0), cluster=ClusterSettings(cpus=1), ready_file=Path(sys.argv[1]), shutdown_timeout=1.0
)
received = asyncio.run(serve(settings, announce, lambda cluster: [OnRay(cluster)]))
sys.exit(130 if received == signal.SIGINT else 0)
