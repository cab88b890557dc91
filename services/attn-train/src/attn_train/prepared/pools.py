"""Where the units of a preparation are made: in this process, in a pool of processes, or on the machines of Ray."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from attn_core.errors import AttnError, Unavailable, UserError

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


def ray_data(folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterator[list[Shard]]:
    """By Ray Data, on the machines of a cluster that share the folder."""
    import ray.data

    numbers = [{"number": number} for number, _ in units]
    if not numbers:
        return
    rows = ray.data.from_items(numbers, override_num_blocks=len(numbers))
    made_rows = rows.map_batches(_RayMaker, fn_constructor_args=(str(folder),), batch_size=1, concurrency=workers)
    for row in made_rows.iter_rows():
        result = msgspec.json.decode(row["shards"], type=list[Shard] | str)
        if isinstance(result, str):
            raise UserError(result)
        yield result


class _RayMaker:
    """A worker of Ray Data."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        results = [made(self._folder, int(number)) for number in batch["number"]]
        told = [result[1] if isinstance(result, tuple) else result for result in results]
        return {"shards": np.array([msgspec.json.encode(result).decode() for result in told], dtype=object)}
