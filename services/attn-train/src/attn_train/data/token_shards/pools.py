"""Executors of the units of a preparation: this process, a pool of processes, or a Ray cluster."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from attn_core.errors import AttnError, Unavailable, UserError, cleaning_up, starting
from attn_gateway import Cluster, ClusterSettings

from attn_train.data.token_shards.inputs import Unit
from attn_train.data.token_shards.prepare import UnitMaker
from attn_train.data.token_shards.shards import Shard


def inline(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:  # noqa: ARG001
    """Process the units in this process, in parallel by the tokenizer's own threads."""
    maker = UnitMaker(folder)
    for number, _ in units:
        yield maker.shards(number)


_makers: dict[Path, UnitMaker] = {}


def made(folder: Path, number: int) -> list[Shard] | tuple[str, str]:
    """Make the shards of a unit in a process of a pool; an `AttnError` is returned as its reason and message."""
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
    """Process the units in a pool of processes."""
    if workers == 1 or len(units) < 2:
        yield from inline(folder, units, 1)
        return
    with ProcessPoolExecutor(min(workers, len(units)), multiprocessing.get_context("spawn")) as pool:
        try:
            with starting("a unit of the data"):
                waiting = [pool.submit(made, folder, number) for number, _ in units]
            for future in as_completed(waiting):
                yield _made_or_raised(future.result())
        except BrokenProcessPool as error:
            raise Unavailable("a process died; repeat the command to continue from the finished parts") from error
        finally:
            pool.shutdown(cancel_futures=True)


def ray_tasks(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:
    """Process the units as Ray tasks: on the cluster at RAY_ADDRESS, whose machines share the folder, or locally."""
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
                raise Unavailable(f"a Ray worker was lost: {str(error).splitlines()[0]}") from error
    finally:
        with cleaning_up("Ray"):
            runner.run(cluster.stop())
        runner.close()
