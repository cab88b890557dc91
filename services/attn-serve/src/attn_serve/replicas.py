"""The replicas of a model as a Ray Serve deployment, and the client that distributes tasks over them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
from attn_core.errors import (
    AttnError,
    MissingPackage,
    Unavailable,
    UserError,
    WrongState,
)
from attn_engine.client import EmbedTask, EngineClient, EngineLost, TextTask, resumed
from attn_engine.host.ranks import require_tensor_parallel
from attn_engine.host.tokenization import PromptTokenizer
from attn_gateway import ReplicaTls
from attn_gateway.ray_gpus import gpu_request, known_gpus, require_free
from attn_models.tokenizers import Tokenizer
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    DeploymentConfig,
    Embeddings,
    EngineConfig,
    EngineStats,
    ModelInfo,
    OutputDelta,
    Prompt,
    ReplicaStats,
    Tokenization,
)

from attn_serve.adapter_folders import AdapterFolders
from attn_serve.placement import engine_environment, rank_resources, require_places, with_threads
from attn_serve.ray_actors import ModelReplica
from attn_serve.replica_client import ReplicaClient
from attn_serve.replica_messages import ReplicaAddress, StateTicket
from attn_serve.replica_weights import ReplicaWeights
from attn_serve.routing import PrefixRouter, block_hashes
from attn_serve.sources import weight_files

log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
"""Interval at which the replicas' addresses are requested while replicas are missing."""
CALM_POLL_SECONDS = 2.0
"""The same interval while no replica is missing."""
ABSENT_POLLS = 2
"""How often in a row the deployment must be found deleted before the model is given up."""
ADDRESS_SECONDS = 5.0
WAKE_SECONDS = 60.0
"""Timeout of the call that makes Ray Serve start a replica when none runs."""
HEALTH_SECONDS = 2.0
SHUTDOWN_SECONDS = 30.0
"""How long a replica that is being stopped may take to hand over its requests."""
MAX_CONTROL_CALLS = 1000
APP_PREFIX = "attn-"
SERVE_CALLS = threading.Lock()
"""Lock held while a model is deployed: Ray Serve fails if two threads start it, or deploy, at the same time."""


class Replicas(EngineClient):
    """Serves one model from a Ray Serve deployment, which it creates, or joins if another gateway has created it."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: EngineConfig,
        deployment: DeploymentConfig,
        tls: ReplicaTls | None = None,
        *,
        start_ray: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self.start_ray = start_ray
        self._name = name
        self._tls = tls
        self._folder = folder
        self._config = with_threads(config)
        self._deployment = deployment
        self._router = PrefixRouter()
        self._replicas: dict[str, ReplicaClient] = {}
        self._replica_of_task: dict[str, ReplicaClient] = {}
        self._handle: Any = None
        self._watcher: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._adapters = AdapterFolders()
        self._weights = ReplicaWeights(folder)
        self._refused: AttnError | None = None
        """Why no replica that was started last could load the model, such as that its files have changed."""
        self._tokenizer: PromptTokenizer | None = None
        self._joined = self._deployed = False
        self._wake_requested = False
        """Whether a request has found no replica since `_wake` last requested one."""
        self._background: set[asyncio.Task[Any]] = set()

    scalable = True

    @property
    def replicas(self) -> int:
        """The number of replicas that accept tasks."""
        return sum(not replica.draining for replica in self._replicas.values())

    async def start(self) -> ModelInfo:
        """Deploy the model, or join its deployment; returns when all initial replicas answer.

        Raises the errors of loading, and `InvalidValue` or `OutOfCapacity` if the machines have no room for the
        replicas.
        """
        if self.start_ray is not None:
            await self.start_ray()
        await asyncio.to_thread(require_tensor_parallel, self._folder, self._config)
        self._handle = await asyncio.to_thread(self._deploy)
        addresses = await self._addresses()
        while not addresses:
            if self._deployment.min_replicas:
                await asyncio.sleep(POLL_SECONDS)
            else:
                await self._wake()  # the first replica may have been stopped as idle by now
            addresses = await self._addresses()
        self._weights.require_unchanged(addresses)
        await self._connect(addresses)
        self._tokenizer = PromptTokenizer(await asyncio.to_thread(Tokenizer.from_folder, self._folder))
        self._watcher = asyncio.create_task(self._watch(), name=f"replicas of {self._name}")
        self._deployed = True  # a client that fails to join a deployment does not delete it
        return addresses[0].info

    async def scale(self, deployment: DeploymentConfig) -> None:
        """Change the number of replicas; those that are removed hand over their requests first."""
        await asyncio.to_thread(require_places, self._folder, self._config, deployment)
        self._deployment = deployment
        self._joined = False
        await asyncio.to_thread(self._deploy)
        self._changed.set()

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """The tokens of a prompt, which is tokenised in this process."""
        if self._tokenizer is None:
            raise self._stopped()
        return await asyncio.to_thread(self._tokenizer.tokenize, prompt)

    async def stats(self) -> EngineStats:
        """The summed statistics of all replicas."""
        return total(self.stats_by_replica())

    def stats_by_replica(self) -> dict[str, EngineStats]:
        """The engine statistics of each replica, by replica id."""
        return {name: replica.stats for name, replica in self._replicas.items()}

    def require_places(self, deployment: DeploymentConfig) -> None:
        """Raise unless the cluster has room for the replicas of `deployment`; see `placement.require_places`."""
        require_places(self._folder, self._config, deployment)

    async def pids(self) -> list[int]:
        """The process ids of the replicas that accept tasks, for monitoring or killing the processes."""
        return [replica.address.pid for replica in self._replicas.values() if not replica.draining]

    async def release(self, shutdown_timeout: float) -> None:
        """Like `stop`, but keep the deployment if other gateways use its replicas."""
        others = any(replica.gateways > 1 for replica in self._replicas.values())
        await self._leave(shutdown_timeout)
        if not others:
            await asyncio.to_thread(self._delete)

    async def stop(self, shutdown_timeout: float) -> None:
        """Let running tasks finish, then delete the deployment."""
        await self._leave(shutdown_timeout)
        await asyncio.to_thread(self._delete)

    async def _leave(self, shutdown_timeout: float) -> None:
        """Let running tasks finish and disconnect from the replicas, without deleting the deployment."""
        self._handle = None
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(replica.drained(shutdown_timeout) for replica in list(self._replicas.values())))
        self.streams.fail(Unavailable(f"model {self._name!r} is being unloaded"))
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))
        self._replicas.clear()

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter on all replicas; those that start later load it too."""
        await self._call_all("load_adapter", name, folder)
        await self._adapters.add(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter from all replicas; running tasks go on."""
        await self._call_all("unload_adapter", name)
        self._adapters.remove(name)

    async def sleep(self, shutdown_timeout: float) -> None:
        """Free weights and KV cache of all replicas, also of those that start later."""
        await self._weights.sleep(shutdown_timeout, self._replicas.values())

    async def wake_up(self) -> None:
        """Load the model again on all replicas, or on none."""
        await self._weights.wake_up(self._replicas.values())

    async def update_weights(self, data: bytes, offset: int, shutdown_timeout: float, *, last: bool) -> None:
        """Replace the weights of all replicas or of none; those that start later get them too."""
        await self._weights.update((data, offset), shutdown_timeout, self._replicas, last=last)

    def generate(self, task: TextTask) -> AsyncGenerator[OutputDelta, None]:
        """The deltas of a task, whose rest another replica computes if its own is lost, unless with other weights."""
        return resumed(task, partial(self._follow, self._weights.version))

    def _follow(self, version: int, part: TextTask) -> AsyncGenerator[OutputDelta, None]:
        if part.resume is not None and version != self._weights.version:
            raise WrongState("aborted: the replica was lost, and the model has other weights now")
        return self.streams.follow(part, self.submit, self.cancel)

    async def _call_all(self, method: str, *arguments: Any) -> None:
        if self._handle is None:
            raise self._stopped()
        await asyncio.gather(*(replica.call(method, *arguments) for replica in self._replicas.values()))

    def _stopped(self) -> Unavailable:
        return Unavailable(f"model {self._name!r} is not running")

    def _choose(self, blocks: Sequence[bytes], without: Collection[str] = ()) -> ReplicaClient:
        if self._handle is None:
            raise self._stopped()
        free = {name: one for name, one in self._replicas.items() if not one.draining and name not in without}
        loads = {name: replica.load for name, replica in free.items()}
        if not loads and self._refused is not None:
            raise self._refused
        if not loads:
            self._wake_requested = True
            self._changed.set()
            raise EngineLost(f"no replica of model {self._name!r} is running; one is being started")
        return self._replicas[self._router.choose(blocks, loads)]

    async def submit(self, task: TextTask, ticket: StateTicket | None = None) -> None:
        """Submit a task to a suitable replica, with a ticket for the state of its prompt if there is one."""
        self._adapters.require_unchanged(task.adapter)
        replica = self.choose_for(task)
        self._replica_of_task[task.id] = replica
        await replica.submit(task, ticket)

    def choose_for(self, task: TextTask, without: Collection[str] = ()) -> ReplicaClient:
        """The replica that suits a task, except those named in `without`; raises `EngineLost` if no other runs."""
        return self._choose(block_hashes(task.prompt, f"{task.tenant}\0{task.adapter}"), without)

    async def _embed(self, task: EmbedTask) -> Embeddings:
        replica = self._replica_of_task[task.id] = self._choose(())
        return await replica.embed(task)

    async def _attention_maps(self, request: AttentionMapsRequest, adapter: str) -> list[AttentionMap]:
        found: list[AttentionMap] = await self._choose(()).call("attention_maps", request, adapter)
        return found

    async def cancel(self, task_id: str) -> None:
        """Stop a task; unknown ids are ignored."""
        replica = self._replica_of_task.pop(task_id, None)
        if replica is not None:
            await replica.cancel(task_id)

    async def _watch(self) -> None:
        """Connect to the replicas that Ray Serve starts, until the model is unloaded, here or by another gateway."""
        absent = 0
        while self._handle is not None:
            self._replica_of_task = {
                name: where for name, where in self._replica_of_task.items() if name in where.tasks
            }
            calm = self.replicas >= self._deployment.at_first
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CALM_POLL_SECONDS if calm else POLL_SECONDS)
            self._changed.clear()
            try:
                await self._connect(await self._addresses())
                self._refused = None
                absent = absent + 1 if not self.replicas and await asyncio.to_thread(self._is_deleted) else 0
                if absent == ABSENT_POLLS:
                    self._deployed = False  # what is deployed under this name from now on is another gateway's
                    self.on_unloaded()
                    return
                if self._wake_requested and not self.replicas:
                    await self._wake()
            except UserError as error:
                self._refused = error
            except Exception as error:  # noqa: BLE001 - Ray has many; those of a control plane that is busy pass
                log.warning("replicas of %s: %s", self._name, error)
                await asyncio.sleep(POLL_SECONDS)

    async def _addresses(self) -> list[ReplicaAddress]:
        """The addresses of the replicas that run now; raises the error of loading if all replicas failed to load."""
        from ray.serve.exceptions import RayServeException

        if self._handle is None:
            return []
        try:
            broadcast = self._handle.broadcast("address")
            answers = await broadcast.results_async(timeout_s=ADDRESS_SECONDS, return_exceptions=True)
        except (RayServeException, TimeoutError):
            return []
        found = [answer for answer in answers if isinstance(answer, ReplicaAddress)]
        causes = [getattr(answer, "cause", answer) for answer in answers if not isinstance(answer, ReplicaAddress)]
        for cause in causes:
            if not found and isinstance(cause, AttnError):
                raise cause
        return found

    async def _wake(self) -> None:
        """Make Ray Serve start a replica when none runs: it starts one for any call that it has to route."""
        from ray.exceptions import RayTaskError

        self._wake_requested = False
        try:
            await asyncio.wait_for(self._handle.address.remote(), WAKE_SECONDS)
        except TimeoutError:
            pass
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, AttnError) else error) from None
        self._changed.set()

    async def _connect(self, addresses: Sequence[ReplicaAddress]) -> None:
        async def one(address: ReplicaAddress) -> None:
            replica = ReplicaClient(address, self.streams, self._lost, self._tls)
            try:
                await replica.connect()
                await self._adapters.load_into(partial(replica.call, "load_adapter"))
                await self._weights.bring_up(replica, self._replicas)
            except AttnError as error:
                log.warning("replica %s is not used: %s", address.id, error.message)
                await replica.close()

        await asyncio.gather(*(one(address) for address in addresses if address.id not in self._replicas))

    def _lost(self, replica: ReplicaClient) -> None:
        """Continue the tasks of a replica that is gone or draining on other replicas."""
        tasks = list(replica.tasks)
        if replica.gone:
            self._replicas.pop(replica.id, None)
            self.later(replica.close())
        elif self.replicas:
            for task_id in tasks:
                self.later(replica.cancel(task_id))
        else:
            return  # without other replicas, the tasks may finish on the draining one
        self._router.forget(replica.id)
        self.streams.fail(EngineLost(f"replica {replica.id} of model {self._name!r} is gone"), tasks)
        self._changed.set()

    def later(self, work: Any) -> None:
        """Run an awaitable in the background."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _deploy(self) -> Any:
        with SERVE_CALLS:
            return self._run()

    def _run(self) -> Any:
        try:
            from ray import serve
        except ImportError as error:
            raise MissingPackage.of("attn-serve[replicas]", "serving a model from several engines") from error
        app = APP_PREFIX + self._name
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING", "enable_access_log": False})
        if self._joined or (self._handle is None and app in serve.status().applications):
            self._joined = True
            return serve.get_app_handle(app)
        require_places(self._folder, self._config, self._deployment)
        self._deployed = True
        gpu = gpu_request(self._config.device, self._config.gpu_memory_utilization, known_gpus())
        require_free(gpu, "use a smaller --gpu-memory-utilization, or fewer models and jobs")
        config = self._config.replace(device=gpu.device)
        bundle = rank_resources(self._folder, config, gpu)
        ranks = config.tensor_parallel_size
        together: dict[str, Any] = {} if ranks == 1 else {"placement_group_bundles": [bundle] * ranks}
        kind: Any = serve.deployment(
            ModelReplica,
            name=self._name,
            ray_actor_options={
                "num_cpus": 0,
                "num_gpus": bundle.get("GPU", 0.0),
                "memory": bundle.get("memory", 0),
                "runtime_env": {"env_vars": {**engine_environment(config), **gpu.env_vars}},
            },
            max_ongoing_requests=MAX_CONTROL_CALLS,
            health_check_period_s=HEALTH_SECONDS,
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=SHUTDOWN_SECONDS + 5,
            logging_config={"log_level": "WARNING", "enable_access_log": False},
            **replica_counts(self._deployment),
            **together,
        )
        # With a version generated by Ray Serve, every change of the number of replicas would replace all of them.
        version = fingerprint(self._folder, config)
        bound = kind.options(version=version, _internal=True).bind(
            self._folder, config, SHUTDOWN_SECONDS, self._tls, version
        )
        return serve.run(bound, name=app, route_prefix=None)

    def _is_deleted(self) -> bool:
        """Whether the deployment is gone or being deleted."""
        from ray import serve

        found = serve.status().applications.get(APP_PREFIX + self._name)
        return found is None or found.status == "DELETING"

    def _delete(self) -> None:
        if not self._deployed:
            return
        from ray import serve

        self._deployed = False
        with contextlib.suppress(Exception):  # Ray itself may be gone by now
            serve.delete(APP_PREFIX + self._name)


def total(stats: Mapping[str, EngineStats]) -> EngineStats:
    """The summed statistics of several engines, with those of each engine under its name in `replicas`."""
    names = set(EngineStats.__struct_fields__) - {"replicas"}
    sums = {name: sum(getattr(one, name) for one in stats.values()) for name in names}
    return EngineStats(**sums, replicas=tuple(ReplicaStats(name=name, stats=one) for name, one in stats.items()))


def fingerprint(folder: Path, config: EngineConfig) -> str:
    """A hash of a model and its engine config, by which replicas are kept when only their number changes."""
    weights = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in weight_files(folder))
    data = msgspec.json.encode([str(folder), weights, config], enc_hook=str, order="sorted")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def replica_counts(deployment: DeploymentConfig) -> dict[str, Any]:
    """The options of a Ray Serve deployment that set the number of replicas."""
    if deployment.max_replicas is None:
        return {"num_replicas": deployment.at_first}
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": deployment.min_replicas,
            "initial_replicas": deployment.at_first,
            "max_replicas": deployment.max_replicas,
            "target_ongoing_requests": deployment.target_requests,
            "upscale_delay_s": 1.0,
            "downscale_delay_s": deployment.idle_seconds,
            "downscale_to_zero_delay_s": deployment.idle_seconds,
            "metrics_interval_s": 1.0,
            "look_back_period_s": 2.0,
            "policy": {"policy_function": "attn_serve.replicas:replicas_for_load"},
        },
    }


def replicas_for_load(context: Any) -> tuple[int, dict[str, Any]]:
    """The autoscaling policy for Ray Serve: the number of replicas needed for the requests in their engines."""
    config = context.config
    recent = (context.aggregated_metrics or {}).get("requests", {})
    requests = sum(cast("dict[Any, float]", recent).values())
    # Without replicas no engine reports requests; what is pending is the call of `Replicas._wake`.
    if not context.current_num_replicas:
        requests = float(context.total_num_requests)
    wanted = math.ceil(requests / config.target_ongoing_requests)
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}
