"""What all replicas of a model do together: they take other weights, sleep and wake up, all or none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from attn_core.errors import AttnError, Incompatible, WrongState, cleaning_up
from attn_engine.client import EngineLost
from attn_engine.host.weights import StagedWeights

from attn_serve.replica_client import ReplicaClient
from attn_serve.replica_messages import ReplicaAddress


class ReplicaWeights:
    """The weights of all replicas, if they are no longer those of `folder`, and whether they sleep.

    The gateway keeps a copy in memory for replicas that start later. Another gateway would start its own with the
    weights of the folder, so that only one may use replicas whose weights change.
    """

    def __init__(self, folder: Path) -> None:
        self._current, self._next = StagedWeights(folder), StagedWeights(folder)
        self._asleep = False
        self._changing = asyncio.Lock()
        self.version = 0
        """The number of times that the weights have been replaced."""

    def require_unchanged(self, addresses: Iterable[ReplicaAddress]) -> None:
        """Raise `WrongState` if replicas that are joined have other weights than those of the folder, or sleep."""
        if any(address.changed for address in addresses):
            raise WrongState("another gateway has replaced the weights of these replicas: unload the model there first")

    async def bring_up(self, replica: ReplicaClient, replicas: dict[str, ReplicaClient]) -> None:
        """Let a replica that has just started do what the others do, and add it to them."""
        async with self._changing:
            if self._current.folder is not None:
                await _open(replica, self._current)
                await replica.call("use_staged", 0.0)
            if self._asleep:
                await replica.call("sleep", 0.0)
            replicas[replica.id] = replica

    async def update(
        self, part: tuple[bytes, int], seconds: float, replicas: dict[str, ReplicaClient], *, last: bool
    ) -> None:
        """See `EngineClient.update_weights`: all replicas load the weights before the first uses them."""
        _require_alone(replicas.values())
        await asyncio.to_thread(self._next.write, *part)
        if not last:
            return
        staged, self._next = self._next, StagedWeights(self._next.base)
        await asyncio.to_thread(staged.check)
        async with self._changing:
            ready = list(replicas.values())
            try:
                await _all(_open(replica, staged) for replica in ready)
            except AttnError:
                with cleaning_up("weights that not all replicas could load"):
                    await _all(replica.call("drop_staged") for replica in ready)
                raise
            self._current = staged
            self.version += 1
            await _all(replica.call("use_staged", seconds) for replica in ready)

    async def sleep(self, seconds: float, replicas: Collection[ReplicaClient]) -> None:
        """See `EngineClient.sleep`."""
        _require_alone(replicas)
        async with self._changing:
            self._asleep = True
            await _all(replica.call("sleep", seconds) for replica in replicas)

    async def wake_up(self, replicas: Collection[ReplicaClient]) -> None:
        """See `EngineClient.wake_up`; if one replica cannot, all sleep on."""
        async with self._changing:
            try:
                await _all(replica.call("wake_up") for replica in replicas)
            except AttnError:
                with cleaning_up("replicas of which not all could wake up"):
                    await _all(replica.call("sleep", 0.0) for replica in replicas)
                raise
            self._asleep = False


def _require_alone(replicas: Iterable[ReplicaClient]) -> None:
    if any(replica.gateways > 1 for replica in replicas):
        raise Incompatible("another gateway uses the replicas too: only one may when they sleep or get other weights")


async def _open(replica: ReplicaClient, weights: StagedWeights) -> None:
    for data, offset in weights.parts():
        await replica.call("stage_weights", data, offset)
    await replica.call("open_staged")


async def _all(calls: Iterable[Any]) -> None:
    """Await calls of all replicas, then raise the first error; replicas that are lost meanwhile are replaced."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, EngineLost):
            raise answer
