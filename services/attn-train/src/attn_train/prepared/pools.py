"""Where the units of a preparation are made: in this process, in a pool of processes, or on the machines of Ray."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from attn_core.errors import AttnError, Unavailable, UserError
from attn_gateway import Cluster, ClusterSettings

from attn_train.prepared.inputs import Unit
from attn_train.prepared.prepare import UnitMaker
from attn_train.prepared.shards import Shard


def inline(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:  # noqa: ARG001
    """In this process, where the tokenizer's own threads share the work."""
    maker = UnitMaker(folder)
    for number, _ in units:
        yield maker.shards(number)


_makers: dict[Path, UnitMaker] = {}


def made(folder: Path, number: int) -> list[Shard] | tuple[str, str]:
    """The shards of a unit, made in a process of a pool; the reason and message of what a user is to read."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if folder not in _makers:
        _makers.clear()
        _makers[folder] = UnitMaker(folder)
    try:
        return _makers[folder].shards(number)
    except AttnError as error:
        return error.reason, error.message


def _made_or_raised(result: list[Shard] | tuple[str, str]) -> list[Shard]:
    if isinstance(result, tuple):
        raise UserError(result[1])
    return result


def processes(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:
    """In a pool of processes."""
    if workers == 1 or len(units) < 2:
        yield from inline(folder, units, 1)
        return
    with ProcessPoolExecutor(min(workers, len(units)), multiprocessing.get_context("spawn")) as pool:
        try:
            waiting = [pool.submit(made, folder, number) for number, _ in units]
            for future in as_completed(waiting):
                yield _made_or_raised(future.result())
        except BrokenProcessPool as error:
            raise Unavailable("a process ended before its time; the same command goes on from what is done") from error
        finally:
            pool.shutdown(cancel_futures=True)


def ray_tasks(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:
    """As tasks of Ray: on the machines of the cluster at RAY_ADDRESS, which share the folder, or on this one."""
    runner = asyncio.Runner()
    cluster = Cluster(ClusterSettings(address=os.environ.get("RAY_ADDRESS"), cpus=workers))
    runner.run(cluster.start())
    try:
        import ray

        task = ray.remote(num_cpus=1)(made)
        waiting = [task.remote(folder.absolute(), number) for number, _ in units]
        while waiting:
            done, waiting = ray.wait(waiting)
            try:
                yield _made_or_raised(ray.get(done[0]))
            except ray.exceptions.RayError as error:
                raise Unavailable(f"a worker of Ray was lost: {str(error).splitlines()[0]}") from error
    finally:
        runner.run(cluster.stop())
        runner.close()
