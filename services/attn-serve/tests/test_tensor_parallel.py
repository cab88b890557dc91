"""A model that is split over ranks answers as one that is not, and comes back whole when a rank is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest
from attn_core.errors import InvalidValue
from attn_engine.client import EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_gateway import Cluster, ClusterSettings
from attn_schema import DeploymentConfig, EngineConfig, Prompt, SamplingParams
from attn_serve.child_process import ChildProcess
from attn_serve.disaggregation import require_movable
from attn_serve.replicas import Replicas
from attn_serve.served_models import require_adaptable

SECONDS = 120
"""How long anything may take; nothing is expected to."""
WHOLE = EngineConfig(num_threads=1, kv_cache_memory_bytes=2**22)
SPLIT = WHOLE.replace(tensor_parallel_size=2)


def generation(**params: float) -> TextTask:
    return TextTask(prompt=Prompt(text="To be"), params=SamplingParams(max_new_tokens=24, **params))


async def tokens_of(engine: EngineClient, wanted: TextTask) -> list[int]:
    return [token.id async for delta in engine.generate(wanted) for token in delta.tokens]


async def whole_tokens(folder: Path) -> list[list[int]]:
    """The tokens of one process, greedy and sampled."""
    engine = InProcess(folder, WHOLE)
    await engine.start()
    found = [await tokens_of(engine, generation(**params)) for params in WAYS]
    await engine.stop(0)
    return found


WAYS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3})


def ranks_of(leader: int) -> list[int]:
    """The processes of the other ranks: children of the first, or actors of the same Ray."""
    children = [child.pid for child in psutil.Process(leader).children()]
    parent = psutil.Process(leader).ppid()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.ppid() == parent and "RankActor" in " ".join(process.cmdline()):
                children.append(process.pid)
    return children


async def until(holds: object) -> None:
    """Wait for a condition."""
    end = asyncio.get_running_loop().time() + SECONDS
    while not await holds():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)


async def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


async def survives_a_killed_rank(engine: EngineClient, leader: int, expected: list[list[int]]) -> None:
    """Kill a rank under a stream: its tokens are those without that, and all processes are new."""
    (rank,) = ranks_of(leader)
    deltas = engine.generate(generation(**WAYS[1]))
    found = [token.id for token in (await anext(deltas)).tokens]
    os.kill(rank, signal.SIGKILL)
    async with asyncio.timeout(SECONDS):
        found += [token.id async for delta in deltas for token in delta.tokens]
    assert found == expected[1]
    await until(lambda: gone(rank))
    await until(lambda: gone(leader))


async def test_a_child_with_ranks_answers_as_one_process_and_comes_back(home: Path) -> None:
    folder = home / "models" / "tiny"
    expected = await whole_tokens(folder)
    engine = ChildProcess(folder.name, folder, SPLIT)
    await engine.start()
    assert [await tokens_of(engine, generation(**params)) for params in WAYS] == expected
    (leader,) = await engine.pids()
    await survives_a_killed_rank(engine, leader, expected)
    assert await tokens_of(engine, generation(**WAYS[0])) == expected[0]
    (leader,) = await engine.pids()
    (rank,) = ranks_of(leader)
    await engine.stop(1.0)
    await until(lambda: gone(rank))


async def test_ranks_that_do_not_divide_the_heads_are_refused(home: Path) -> None:
    folder = home / "models" / "tiny"
    with pytest.raises(InvalidValue) as refused:
        await ChildProcess(folder.name, folder, WHOLE.replace(tensor_parallel_size=64)).start()
    assert refused.value.metadata["field"] == "tensor_parallel_size"


@pytest.mark.ray
@pytest.mark.cluster
async def test_a_replica_with_ranks_is_replaced_as_a_whole(home: Path, tmp_path: Path) -> None:
    cluster = Cluster(ClusterSettings(cpus=2, home=tmp_path))
    await cluster.start()
    folder = home / "models" / "tiny"
    expected = await whole_tokens(folder)
    engine = Replicas("split", folder, SPLIT, DeploymentConfig(replicas=1))
    await engine.start()
    assert [await tokens_of(engine, generation(**params)) for params in WAYS] == expected
    (leader,) = await engine.pids()
    await survives_a_killed_rank(engine, leader, expected)
    (leader,) = await engine.pids()
    (rank,) = ranks_of(leader)
    await engine.stop(1.0)
    await until(lambda: gone(rank))
    await cluster.stop()


def test_prefill_replicas_are_refused_beside_ranks(home: Path) -> None:
    folder = home / "models" / "tiny"
    require_movable(folder, WHOLE)
    with pytest.raises(InvalidValue, match="tensor_parallel_size: 2 is not allowed; allowed: 1, with prefill_replicas"):
        require_movable(folder, SPLIT)


def test_adapters_are_refused_on_a_model_with_ranks() -> None:
    require_adaptable("tone", WHOLE)
    with pytest.raises(InvalidValue, match="tensor_parallel_size: 2 is not allowed; allowed: 1, as the adapter 'tone'"):
        require_adaptable("tone", SPLIT)
