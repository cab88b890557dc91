"""A gateway with the inference service and engines in its own process: `gateway_process.py HOME PORT READY_FILE`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from attn_engine.client import EngineClient
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings, GatewaySettings, serving
from attn_schema import DeploymentConfig, EngineConfig
from attn_serve.service import InferenceGrpc


class NoCluster(Cluster):
    async def start(self) -> None:
        """Nothing runs elsewhere."""


class InProcessInference(InferenceGrpc):
    def _engine(self, name: str, folder: Path, config: EngineConfig, deployment: DeploymentConfig) -> EngineClient:
        del name, deployment
        return InProcess(folder, config.replace(num_threads=1))


async def main(home: Path, port: int, ready: Path) -> None:
    service = InProcessInference(NoCluster(ClusterSettings(home=home)))
    async with serving([service], GatewaySettings(port=port)) as gateway:
        made = ready.with_suffix(".new")
        made.write_text(gateway.address)
        made.rename(ready)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
