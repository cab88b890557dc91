"""Disaggregated prefill: some replicas of a model compute prompts, others decode.

A long prompt no longer delays the tokens of requests in the same batch (Zhong et al. 2024, "DistServe", arXiv
2401.09670; like vLLM's prefill and decode instances). The state of the prompt is sent from replica to replica without
passing through the gateway: `attn_serve.state_transfer`. If the state is lost, the request is still computed: by
another prefill replica, or entirely by the decode replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from attn_core import installed
from attn_core.errors import AttnError, DeadlineExceeded, Incompatible, InvalidValue, Unavailable
from attn_engine.client import EmbedTask, EngineClient, EngineLost, TextTask
from attn_gateway import ReplicaTls
from attn_models.adapters.native import SOURCE
from attn_models.loading.encoders import is_encoder
from attn_models.weights.safe_files import read_config
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    DeploymentConfig,
    Embeddings,
    EngineConfig,
    EngineStats,
    ModelInfo,
    Prompt,
    ScoringParams,
    Tokenization,
)

from attn_serve.refusals import estimated_tokens
from attn_serve.replica_client import ReplicaClient
from attn_serve.replica_messages import StateTicket
from attn_serve.replicas import Replicas, total
from attn_serve.state_transfer import StateLost

log = logging.getLogger(__name__)

PREFILL_SUFFIX = "+prefill"
"""Suffix of the name of the prefill deployment; names of models contain no plus sign."""
NONE_RUNS, LOST = "no prefill replica runs", "the prefill replica or the state was lost"
MAX_ATTEMPTS = 2
"""How many prefill attempts are made before the decode replica computes the prompt itself."""


class DisaggregatedReplicas(EngineClient):
    """Serves one model from two deployments: one computes prompts (prefill), the other generates tokens (decode).

    Prompts of fewer than `prefill_min_tokens` tokens (estimated from their bytes), and sequences that are scored, are
    computed by the decode replicas.
    """

    def __init__(
        self,
        prefill: Replicas,
        decode: Replicas,
        deployment: DeploymentConfig,
        *,
        drafts: bool = False,
    ) -> None:
        super().__init__()
        self.streams = decode.streams
        self.prefill = prefill
        self.decode = decode
        decode.on_unloaded = lambda: self.on_unloaded()  # noqa: PLW0108 -- which is set later
        self._deployment = deployment
        self._drafts = drafts
        self.outcomes: Counter[str] = Counter()
        """Counts of long prompts by outcome: `moved`, or the reason why a decode replica computed them."""

    @classmethod
    def of(
        cls,
        name: str,
        folder: Path,
        config: EngineConfig,
        deployment: DeploymentConfig,
        tls: ReplicaTls | None = None,
        *,
        start_ray: Callable[[], Awaitable[None]] | None = None,
    ) -> DisaggregatedReplicas:
        """Create the client of the model in a folder; raises as `require_movable` if its states cannot be moved."""
        require_movable(folder, config)
        prefill = Replicas(name + PREFILL_SUFFIX, folder, config, deployment.prefill, tls, start_ray=start_ray)
        decode = Replicas(name, folder, config, deployment.decode, tls, start_ray=start_ray)
        return cls(prefill, decode, deployment, drafts=config.draft_model is not None)

    scalable = True

    @property
    def replicas(self) -> int:
        """The number of replicas of both kinds that accept tasks."""
        return self.prefill.replicas + self.decode.replicas

    async def start(self) -> ModelInfo:
        """Deploy or join both deployments.

        Raises as `Replicas.start`, also if there is room for each deployment but not for both together.
        """
        if self.decode.start_ray is not None:
            await self.decode.start_ray()
        await asyncio.to_thread(self.decode.require_places, self._deployment.together)
        starts = [asyncio.ensure_future(one) for one in (self.decode.start(), self.prefill.start())]
        await asyncio.wait(starts)  # if one fails, the other is not left half started
        info, _ = [start.result() for start in starts]
        if self._drafts:
            note = (
                "the draft model of a decode replica computes every prompt, even if a prefill replica has computed it"
            )
            info = info.replace(note="; ".join(filter(None, (info.note, note))))
        return info

    async def scale(self, deployment: DeploymentConfig) -> None:
        """Change the numbers of replicas of both kinds."""
        await asyncio.to_thread(self.decode.require_places, deployment.together)
        self._deployment = deployment
        await asyncio.gather(self.decode.scale(deployment.decode), self.prefill.scale(deployment.prefill))

    async def cancel(self, task_id: str) -> None:
        """Stop a task, whether its prompt is being computed or it is decoded."""
        await asyncio.gather(*(group.cancel(task_id) for group in self._groups))

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt."""
        return await self.decode.tokenize(prompt)

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter on all replicas of both kinds."""
        await asyncio.gather(*(group.load_adapter(name, folder) for group in self._groups))

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter from all replicas; running tasks go on."""
        await asyncio.gather(*(group.unload_adapter(name) for group in self._groups))

    async def stats(self) -> EngineStats:
        """The summed statistics of all replicas."""
        return total(self._stats())

    async def _embed(self, task: EmbedTask) -> Embeddings:
        return await self.decode._embed(task)  # noqa: SLF001 -- of the same class

    async def _attention_maps(self, request: AttentionMapsRequest, adapter: str) -> list[AttentionMap]:
        return await self.decode._attention_maps(request, adapter)  # noqa: SLF001 -- of the same class

    async def pids(self) -> list[int]:
        """The process ids of the replicas that accept tasks, for monitoring or killing the processes."""
        return [pid for group in self._groups for pid in await group.pids()]

    async def release(self, shutdown_timeout: float) -> None:
        """Like `stop`, but keep the deployments if other gateways use their replicas."""
        await asyncio.gather(*(group.release(shutdown_timeout) for group in self._groups))

    async def stop(self, shutdown_timeout: float) -> None:
        """Let running tasks finish, then delete both deployments."""
        await asyncio.gather(*(group.stop(shutdown_timeout) for group in self._groups))

    @property
    def _groups(self) -> Iterable[Replicas]:
        return self.prefill, self.decode

    def _stats(self) -> dict[str, EngineStats]:
        kinds = {"prefill": self.prefill, "decode": self.decode}
        return {
            f"{kind} {name}": one for kind, group in kinds.items() for name, one in group.stats_by_replica().items()
        }

    def moves(self, task: TextTask) -> bool:
        """Whether the prompt of a task should be computed by a prefill replica, if one runs."""
        if isinstance(task.params, ScoringParams):
            return False  # the log probabilities of the prompt's tokens are no part of a state
        return estimated_tokens(task.prompt) >= self._deployment.prefill_min_tokens

    async def submit(self, task: TextTask) -> None:
        """Start a task on a decode replica, after a prefill replica has computed its prompt if that is long."""
        if not self.moves(task):
            await self.decode.submit(task)
            return
        loop = asyncio.get_running_loop()
        began = loop.time()

        def left() -> TextTask:
            """The task with the time that remains as its timeout."""
            return task if task.timeout is None else replace(task, timeout=remaining(task.timeout, loop.time() - began))

        why = NONE_RUNS
        failed: set[str] = set()
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._move(left(), failed)
            except NoPrefillError as error:
                why = why if failed and error.why == NONE_RUNS else error.why
                break
            except StateLost as error:
                why = LOST
                log.warning("task %s: %s", task.id, error.message)
            else:
                self.outcomes["moved"] += 1
                return
        log.warning("task %s: the decode replica computes its prompt: %s", task.id, why)
        self.outcomes[why] += 1
        await self.decode.submit(left())

    def _prefill_replica(self, task: TextTask, failed: Collection[str]) -> ReplicaClient:
        """The prefill replica for a task's prompt; raises `NoPrefillError` if there is none."""
        if not self.decode.replicas:
            raise NoPrefillError("no decode replica runs")
        try:
            return self.prefill.choose_for(task, failed)
        except EngineLost as error:
            raise NoPrefillError(NONE_RUNS) from error

    async def _move(self, task: TextTask, failed: set[str]) -> None:
        """Compute the prompt on a prefill replica, then submit the task with a ticket for its state.

        Raises `NoPrefillError` or `StateLost`.
        """
        replica = self._prefill_replica(task, failed)
        failed.add(replica.id)  # the next attempt may start before the broken connection is detected
        ticket = await self._ticket(replica, task)
        try:
            await self.decode.submit(task, ticket)
        except BaseException:
            self.prefill.later(replica.cancel(task.id))
            raise

    async def _ticket(self, replica: ReplicaClient, task: TextTask) -> StateTicket:
        replica.tasks.add(task.id)
        answered = False
        try:
            ticket: StateTicket = await replica.call("prefill", task)
            answered = True
        except Unavailable as error:
            raise StateLost(f"prefill replica {replica.id} is gone or draining") from error
        except AttnError as error:
            answered = True
            raise NoPrefillError(f"refused: {error.reason}") from error
        finally:
            replica.tasks.discard(task.id)
            if not answered:
                self.prefill.later(replica.cancel(task.id))
        return ticket


class NoPrefillError(Exception):
    """No prefill replica computes a prompt: the decode replica does, or raises the error of an invalid prompt."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def remaining(timeout: float, passed: float) -> float:
    """The seconds left of a timeout after `passed` seconds; raises `DeadlineExceeded` if there are none."""
    if passed >= timeout:
        raise DeadlineExceeded("the deadline passed while the prompt was computed")
    return timeout - passed


def require_movable(folder: Path, config: EngineConfig) -> None:
    """Raise if no other replica could continue from the state of this model's prompts, without loading the model.

    `Incompatible` for a model without a state (an encoder) and for one whose state is mostly that of another sequence
    (an encoder-decoder); `InvalidValue` for a cache that cannot export and restore states, and for tensor parallelism.
    """
    remedy = "leave prefill_replicas out for this model"
    if config.tensor_parallel_size > 1:
        raise InvalidValue.of("tensor_parallel_size", config.tensor_parallel_size, "1, with prefill_replicas")
    if is_encoder(folder):
        raise Incompatible(f"prefill_replicas: {folder.name} is an encoder, which generates nothing; {remedy}")
    config_file = read_config(folder / "config.json")
    if config_file.get("model_type") == SOURCE or config_file.get("is_encoder_decoder"):
        message = f"prefill_replicas: {folder.name} is an encoder-decoder model, whose encoder must run on"
        raise Incompatible(f"{message} the decode replica; {remedy}")
    if not installed().caches.get(config.kv_cache).portable:
        raise InvalidValue.of(
            "kv_cache", config.kv_cache, "a cache whose states can be exported and restored, with prefill_replicas"
        )
