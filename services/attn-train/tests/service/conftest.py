"""A real gateway on loopback with training behind it, and a real client."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn.v1.training_pb2_grpc import TrainingServiceStub
from attn_gateway import Cluster, ClusterSettings, GatewaySettings, serving
from attn_schema.training import CheckpointConfig, JobState, TrainingConfig
from attn_train.records import Stop
from attn_train.settings import TrainSettings
from attn_train.store import JobStore
from thread_workers import TrainingInThreads

STEPS = 1_000_000
"""More than there is time for: the job is stopped."""

SERVER = """
import asyncio, sys
from pathlib import Path
from attn_gateway import Cluster, ClusterSettings, serving
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

home, address, *node = sys.argv[1:]
if node:
    import ray._private.services as services
    # On one machine Ray would take any node of it.
    found = services.get_node_to_connect_for_driver
    services.get_node_to_connect_for_driver = lambda gcs, **asked: found(gcs, **asked | {"node_name": node[0]})

async def main():
    cluster = Cluster(ClusterSettings(home=Path(home), address=address or None, cpus=2))
    async with serving([TrainingGrpc(cluster, TrainSettings(threads=1))]):
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def home(tmp_path: Path, words: str) -> Path:
    folder = tmp_path / "home"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "words.txt").write_text(words)
    return folder


@pytest.fixture
def wire_config(home: Path) -> pb.TrainingConfig:
    """Twenty steps of a small decoder."""
    return pb.TrainingConfig(
        model=pb.ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=8, mechanism="mha"),
        data=pb.DataConfig(dataset=str(home / "data" / "words.txt")),
        optimizer=pb.OptimizerConfig(steps=20, batch_size=4, learning_rate=1e-2, warmup_steps=2),
        checkpoint=pb.CheckpointConfig(save_steps=10),
        evaluation=pb.EvaluationConfig(eval_steps=10, eval_batches=2),
        seed=5,
    )


Serve = Callable[..., contextlib.AbstractAsyncContextManager[TrainingServiceStub]]


@contextlib.asynccontextmanager
async def served(
    home: Path, settings: TrainSettings, gateway: GatewaySettings | None = None
) -> AsyncIterator[TrainingServiceStub]:
    service = TrainingInThreads(Cluster(ClusterSettings(home=home)), settings)
    async with (
        serving([service], gateway, shutdown_timeout=20.0) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield TrainingServiceStub(channel)


@pytest.fixture
def server(home: Path) -> Serve:
    """`async with server() as stub`: a server over the same home each time."""
    return lambda **settings: served(home, TrainSettings(**settings))


@pytest.fixture
def shared(home: Path, tmp_path: Path) -> Serve:
    """`async with shared() as stub`: a server with the tokens `op` of the operator, `one` and `two` of tenants."""
    file = tmp_path / "tokens"
    file.write_text("op\none tenant=ann\ntwo tenant=bob\n")
    file.chmod(0o600)
    return lambda **settings: served(home, TrainSettings(**settings), GatewaySettings(port=0, token_file=file))


@pytest.fixture
def insecure(home: Path) -> Serve:
    """`async with insecure() as stub`: a server without tokens that other machines can reach."""
    return lambda: served(home, TrainSettings(), GatewaySettings(port=0, host="0.0.0.0", insecure=True))  # noqa: S104


@pytest.fixture
def by() -> Callable[[str], dict[str, Any]]:
    """What a call with a token is made with."""
    return lambda token: {"metadata": (("authorization", f"Bearer {token}"),)}


async def submit(stub: TrainingServiceStub, config: pb.TrainingConfig, job_id: str = "") -> pb.TrainingJob:
    return (await stub.SubmitTrainingJob(pb.SubmitTrainingJobRequest(job_id=job_id, config=config))).job


async def watch(stub: TrainingServiceStub, job_id: str, after: int = 0) -> list[pb.WatchTrainingJobResponse]:
    """Everything until the stream ends."""
    request = pb.WatchTrainingJobRequest(id=job_id, after_event_id=after)
    return [response async for response in stub.WatchTrainingJob(request)]


@pytest.fixture(name="submit")
def submit_fixture():
    return submit


@pytest.fixture(name="watch")
def watch_fixture():
    return watch


@pytest.fixture
def server_command() -> Callable[..., list[str]]:
    """`server_command(home, address, node)`: a server in a process of its own, over a Ray cluster that stays.

    It is a driver of the node of that name, if one is given. With an empty address it has no Ray.
    """
    return lambda *arguments: [sys.executable, "-c", SERVER, *map(str, arguments)]


@pytest.fixture
def unending(tmp_path: Path, config: TrainingConfig, changed: Callable[..., TrainingConfig], words: str) -> Any:
    """Makes the configuration of a job of two workers that goes on until it is stopped."""

    def make(save_steps: int, **changes: Any) -> TrainingConfig:
        file = tmp_path / "words.txt"
        file.write_text(words)
        asked = {"data__dataset": str(file), "optimizer__steps": STEPS, "evaluation__eval_steps": STEPS, "workers": 2}
        return changed(config, **asked, **changes).replace(checkpoint=CheckpointConfig(save_steps=save_steps))

    return make


class Following:
    """Waits for what becomes of jobs."""

    def __init__(self, store: JobStore, until: Callable[..., None]) -> None:
        self.store, self.until = store, until

    def steps_on(self, job_id: str, count: int = 45) -> None:
        """Wait until a job runs and is so many steps further."""
        self._until_moved(job_id, lambda steps: steps >= count)

    def steps_on_or_back(self, job_id: str, count: int) -> None:
        """Wait until a job runs and is so many steps further, or back at a checkpoint as far behind."""
        self._until_moved(job_id, lambda steps: abs(steps) >= count)

    def _until_moved(self, job_id: str, enough: Callable[[int], bool]) -> None:
        first = self.store.get(job_id)

        def there() -> bool:
            job = self.store.get(job_id)
            assert not job.state.final, job
            return job.state is JobState.RUNNING and enough(job.step - first.step)

        self.until(there, f"{job_id} does not go on")

    def end(self, job_id: str) -> int:
        """Stop a job; its last step."""
        self.store.request_stop(job_id, Stop.SAVE)
        self.until(lambda: self.store.get(job_id).state.final, f"{job_id} does not end")
        return self.store.get(job_id).step

    def losses(self, job_id: str) -> dict[int, set[float]]:
        """Of each step what was measured: one value, if all attempts agree. No event is missing."""
        found: dict[int, set[float]] = {}
        after = 0
        while events := self.store.events(job_id, after, 1000):
            for event in events:
                after += 1
                assert event.id == after
                if event.metrics is not None and "loss" in event.metrics.values:
                    found.setdefault(event.metrics.step, set()).add(event.metrics.values["loss"])
        return found

    def undisturbed(self, asked: TrainingConfig, steps: int) -> dict[int, set[float]]:
        """The losses of a job that nobody disturbs, for at least so many steps."""
        self.store.submit("undisturbed", asked)
        self.until(lambda: self.store.get("undisturbed").step >= steps, "the undisturbed run does not get there")
        self.end("undisturbed")
        return self.losses("undisturbed")

    def require_same_bits(self, job_id: str, asked: TrainingConfig) -> None:
        """Each step of a job that has ended was measured, with the loss that it has undisturbed, to the bit."""
        last, found = self.store.get(job_id).step, self.losses(job_id)
        wanted = self.undisturbed(asked, max(found))
        assert set(range(1, last + 1)) <= set(found)
        assert all(len(values) == 1 for values in found.values())
        assert all(wanted[step] == values for step, values in found.items())


@pytest.fixture
def follow(until: Callable[..., None]) -> Callable[[JobStore], Following]:
    return lambda store: Following(store, until)
