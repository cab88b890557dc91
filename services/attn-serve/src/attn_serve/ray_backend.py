"""A backend that runs the host in a Ray actor, which Ray restarts when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgspec
from attn_core.errors import AttnError, Unavailable, cleaning_up
from attn_engine import RequestOutput
from attn_engine.host import ModelHost, PromptTokenizer, open_host
from attn_engine.host.ranks import require_tensor_parallel
from attn_gateway.gc_heap import freeze_gc_heap
from attn_gateway.ray_gpus import gpu_request, known_gpus, require_free
from attn_models.tokenizers import Tokenizer
from attn_schema import EngineConfig, ModelInfo, OutputDelta

from attn_serve.adapter_folders import AdapterFolders
from attn_serve.in_process import call_host
from attn_serve.rank_actors import actor_environment, actor_ranks, with_threads
from attn_serve.streams import EngineLost, Streams

MAX_CONCURRENT_CALLS = 1000
RESTART_POLL_SECONDS = 0.2
LOST = "the engine died; it is being started again"

PackedOutputs: TypeAlias = tuple[list[tuple[str, AttnError | None]], bytes]
"""Pairs of request id and error, and the deltas in MessagePack, which takes a tenth of the time of pickling them."""
DELTAS = msgspec.msgpack.Decoder(list[OutputDelta])


def packed(outputs: Sequence[RequestOutput]) -> PackedOutputs:
    """Pack outputs for sending to another process."""
    ids = [(output.request_id, output.error) for output in outputs]
    return ids, msgspec.msgpack.encode([output.delta for output in outputs])


def unpacked(outputs: PackedOutputs) -> list[RequestOutput]:
    """Unpack outputs from another process."""
    ids, deltas = outputs
    return [
        RequestOutput(request_id, delta, error)
        for (request_id, error), delta in zip(ids, DELTAS.decode(deltas), strict=True)
    ]


class HostActor:
    """A Ray actor that runs a host. All tasks share one stream of outputs, `outputs`."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        self._folder = folder
        self._config = config
        self._host: ModelHost | None = None
        self._starting = asyncio.Lock()
        self._outputs: asyncio.Queue[Sequence[RequestOutput]] = asyncio.Queue()

    async def start(self, adapters: Mapping[str, Path]) -> ModelInfo:
        """Load the model with these adapters, unless it is loaded; called again after Ray has restarted the actor."""
        async with self._starting:
            if self._host is None:
                loop = asyncio.get_running_loop()

                def deliver(outputs: Sequence[RequestOutput]) -> None:
                    loop.call_soon_threadsafe(self._outputs.put_nowait, outputs)

                host = await asyncio.to_thread(open_host, self._folder, self._config, deliver, actor_ranks)
                for name, folder in adapters.items():
                    await asyncio.to_thread(host.load_adapter, name, folder)
                freeze_gc_heap()
                self._host = host
            return self._host.info

    async def outputs(self) -> AsyncIterator[PackedOutputs]:
        """Yield the outputs of all tasks; each item holds all outputs that are ready."""
        while True:
            ready = list(await self._outputs.get())
            while not self._outputs.empty():
                ready += self._outputs.get_nowait()
            yield packed(ready)

    async def pid(self) -> int:
        """The id of the process that holds the model, for monitoring or killing it."""
        return os.getpid()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host and return its result."""
        if self._host is None:
            if method == "cancel":
                return None
            raise EngineLost("the engine is being started again")
        return await call_host(self._host, method, *arguments)

    async def stop(self, shutdown_timeout: float) -> None:
        """Let running tasks finish, for up to `shutdown_timeout` seconds."""
        if self._host is not None:
            await asyncio.to_thread(self._host.stop, shutdown_timeout)


class RayBackend:
    """Calls one `HostActor`, and distributes its stream of outputs to the waiting tasks."""

    def __init__(self, name: str, folder: Path, config: EngineConfig) -> None:
        self._name = name
        self._folder = folder
        self._config = with_threads(config)
        self._actor: Any = None
        self._listener: asyncio.Task[None] | None = None
        self._tokenizer: PromptTokenizer | None = None
        self._streams = Streams()
        self._adapters = AdapterFolders()
        self._refused: AttnError | None = None
        """Why the engine could not be started again, such as that the model's files have changed."""

    async def start(self, streams: Streams) -> ModelInfo:
        """Start the actor, load the model in it and deliver its outputs to `streams` from now on.

        Raises the errors of loading, `InvalidValue` for a GPU if Ray has none, and `OutOfCapacity` if no GPU has a
        share as large as `gpu_memory_utilization` free.
        """
        import ray

        self._streams = streams
        await asyncio.to_thread(require_tensor_parallel, self._folder, self._config)
        gpu = gpu_request(self._config.device, self._config.gpu_memory_utilization, known_gpus())
        await require_free(gpu, "use a smaller --gpu-memory-utilization, or fewer models and jobs")
        kind = ray.remote(HostActor).options(
            num_cpus=0,
            num_gpus=gpu.num_gpus,
            max_concurrency=MAX_CONCURRENT_CALLS,
            max_restarts=-1,
            runtime_env={"env_vars": {**actor_environment(self._config), **gpu.env_vars}},
        )
        self._actor = kind.remote(self._folder, self._config.replace(device=gpu.device))
        info = await self._remote("start", {})
        self._tokenizer = PromptTokenizer(await asyncio.to_thread(Tokenizer.from_folder, self._folder))
        self._listener = asyncio.create_task(self._listen(), name=f"outputs of {self._name}")
        return cast("ModelInfo", info)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the host. Prompts are tokenised in this process, which is faster than a remote call."""
        if method == "tokenize":
            if self._tokenizer is None:
                raise Unavailable(f"model {self._name!r} is not running")
            return await asyncio.to_thread(self._tokenizer.tokenize, *arguments)
        if self._refused is not None:
            raise self._refused
        if method == "submit":
            self._adapters.require_unchanged(arguments[0].adapter)
        with contextlib.suppress(*([Unavailable] if method == "cancel" else [])):  # a dead engine holds nothing
            answer = await self._remote("call", method, *arguments)
            if method == "load_adapter":
                await self._adapters.add(*arguments)
            elif method == "unload_adapter":
                self._adapters.remove(*arguments)
            return answer

    async def pid(self) -> int:
        """The id of the process that holds the model."""
        return cast("int", await self._remote("pid"))

    async def stop(self, shutdown_timeout: float) -> None:
        """Let running tasks finish, then end the actor."""
        import ray

        if self._actor is None:
            return
        actor = self._actor
        try:
            await asyncio.wait_for(self._remote("stop", shutdown_timeout), timeout=shutdown_timeout + 1)
        except (AttnError, TimeoutError):
            pass  # an actor that is gone or busy is killed just the same
        finally:
            self._actor = self._tokenizer = None
            if self._listener is not None:
                self._listener.cancel()
            with cleaning_up("the actor of the engine"):
                ray.kill(actor)
            self._streams.fail(Unavailable(f"model {self._name!r} is being unloaded"))

    async def _remote(self, method: str, *arguments: Any) -> Any:
        import ray

        if self._actor is None:
            raise Unavailable(f"model {self._name!r} is not running")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise (cause if isinstance(cause, AttnError) else error) from None
        except ray.exceptions.RayActorError as error:
            raise EngineLost(LOST) from error

    async def _listen(self) -> None:
        """Deliver outputs until the model is unloaded, across restarts of its actor."""
        import ray

        while self._actor is not None:
            try:
                async for outputs in self._actor.outputs.options(num_returns="streaming").remote():
                    self._streams.deliver(unpacked(await outputs))
            except ray.exceptions.RayError:
                self._streams.fail(EngineLost(LOST))
                await self._wait_for_restart()

    async def _wait_for_restart(self) -> None:
        while self._actor is not None:
            try:
                await self._remote("start", await self._adapters.unchanged())
            except EngineLost:
                await asyncio.sleep(RESTART_POLL_SECONDS)
            except AttnError as error:
                self._refused = error
                self._streams.fail(error)
                return
            else:
                return
