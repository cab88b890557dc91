"""The ranks of a model that is split over several processes: their rendezvous, their work and their shutdown.

The first rank is the process of the `EngineHost`. It listens at an address; the others are started by a
`RankLauncher`, load their part of the model and follow the messages of the engine (`attn_engine.tensor_parallel`). When
one rank ends, the model cannot be used any more.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from attn_core.errors import AttnError, InvalidValue, Unavailable, WrongState, cleaning_up
from attn_core.models import TakesEmbeddings
from attn_core.splitting import Rank
from attn_models.decoder.decoder import Decoder
from attn_models.loading import LoadedModel, load_model
from attn_models.loading.encoders import is_encoder
from attn_models.loading.models import empty_model
from attn_models.tensor_parallel import Collectives, require_model_split, split_model
from attn_schema import EngineConfig
from attn_schema.cores import rank_cores

from attn_engine.host.loading import use_kernel
from attn_engine.host.memory import with_kv_cache_memory
from attn_engine.tensor_parallel import LOST, Follower, Leader

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""The timeout in seconds for loading the parts, and for the collective operations of a step."""
WATCH_SECONDS = 0.25
"""The interval in seconds at which ended ranks are detected; within a step, failing collectives show them at once."""
STOP_SECONDS = 10.0
"""The seconds that a rank may take to end after it was told to stop."""
SPLITTABLE_QUANTIZATIONS = ("auto", "none")
"""Quantizations in which the parts of a split matrix add up to the whole; those of int8, int4 and fp8 do not, as their
scales differ."""
FOREVER = timedelta(days=365)
LOOPBACK = "127."
Store = dist.TCPStore  # type: ignore[attr-defined]  # torch's stubs leave it out
"""The key-value store that the first rank serves, for its messages and for the rendezvous of the process group."""


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one rank: load part `index` of the model in `folder`, and follow the first rank at `address`."""

    folder: str
    config: EngineConfig
    index: int
    address: str


class Messages:
    """Broadcasts messages from the first rank to all others, in order, through its store."""

    def __init__(self, store: Any, name: str = "message") -> None:
        self._store = store
        self._name = name
        self._count = 0

    def send(self, message: bytes) -> None:
        """Send a message, and delete the previous one.

        All other ranks must have read the previous message; they have if they took part in the sums of its step.
        """
        self._store.set(f"{self._name}/{self._count}", message)
        if self._count:
            self._store.delete_key(f"{self._name}/{self._count - 1}")
        self._count += 1

    def receive(self) -> bytes:
        """Wait for the next message, without a time limit; raises if the first rank has ended."""
        self._store.set_timeout(FOREVER)
        message: bytes = self._store.get(f"{self._name}/{self._count}")
        self._count += 1
        return message


class RankLauncher(Protocol):
    """Starts the other ranks, as processes that end with this one."""

    ip: str
    """The address of this machine at which the other ranks reach it."""

    def start(self, tasks: Sequence[RankTask]) -> None:
        """Start a process for each task, which calls `run_rank`."""
        ...

    def ended(self) -> str | None:
        """A description of how one of the processes has ended; None while all are running."""
        ...

    def stop(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the processes to end, then kill those that are left."""
        ...


def rank_threads(config: EngineConfig) -> int:
    """The number of threads for tensor operations of each rank: that of the config, or its share of the cores."""
    cores = rank_cores(config.tensor_parallel_size)
    if config.num_threads is not None and config.num_threads > cores:
        _warn_of_threads(config.num_threads, cores)
    return config.num_threads or min(torch.get_num_threads(), cores)


@cache
def _warn_of_threads(asked: int, cores: int) -> None:
    log.warning(
        "num_threads is %d, but each rank has only %d of the cores that this process may use: threads wait for one "
        "another in every step; at most %d is faster",
        asked, cores, cores,
    )  # fmt: skip


def require_tensor_parallel(folder: Path, config: EngineConfig) -> None:
    """Raise unless the model in a folder can be split over, and run on, `config.tensor_parallel_size` ranks.

    Weights are not read. `Incompatible` names what cannot be split, `InvalidValue` the field that does not allow it.
    """
    ranks = config.tensor_parallel_size
    if ranks == 1:
        return
    condition = f"with tensor_parallel_size {ranks}"
    if config.quantization not in SPLITTABLE_QUANTIZATIONS:
        allowed = f"{' or '.join(SPLITTABLE_QUANTIZATIONS)}, {condition}"
        raise InvalidValue.of("quantization", config.quantization, allowed)
    if config.kv_offload_bytes:
        raise InvalidValue.of("kv_offload_bytes", config.kv_offload_bytes, f"0, {condition}")
    if is_encoder(folder):
        raise InvalidValue.of("tensor_parallel_size", ranks, "1, as the model is an encoder")
    model = empty_model(folder)
    if not isinstance(model, Decoder) or isinstance(model, TakesEmbeddings):
        raise InvalidValue.of("tensor_parallel_size", ranks, f"1, as a {type(model).__name__} cannot be split")
    try:
        require_model_split(model, ranks)
    except InvalidValue as error:
        raise InvalidValue.of("tensor_parallel_size", ranks, error.metadata["allowed"]) from error


def load_part(folder: Path, config: EngineConfig, index: int) -> LoadedModel:
    """Load the part of the model in a folder that belongs to rank `index`; the whole model if there is one rank."""
    rank = Rank(index, config.tensor_parallel_size)

    def split(model: Any) -> None:
        split_model(model, rank, Collectives.serving())

    return load_model(
        folder,
        config.dtype,
        device=config.device,
        quantization=config.quantization,
        prepare=split if rank.size > 1 else None,
        model_impl=config.model_impl,
    )


class RankGroup:
    """The first rank's handle on the other ranks. `lost` is called once, with the error, when one of them ends."""

    def __init__(
        self, folder: Path, config: EngineConfig, launcher: RankLauncher, lost: Callable[[Exception], None]
    ) -> None:
        if dist.is_initialized():
            raise WrongState("this process already runs a rank of another model")
        self._size = config.tensor_parallel_size
        self._store, address = listen(launcher.ip)
        self._stopping = threading.Event()
        self._launcher = launcher

        def ended(error: Exception) -> None:
            launcher.stop(0.0)
            lost(error)

        self.leader = Leader(Messages(self._store).send, ended)
        config = config.replace(num_threads=rank_threads(config))
        others = range(1, self._size)
        launcher.start([RankTask(folder=str(folder), config=config, index=index, address=address) for index in others])

    def wait_until_ready(self, device: torch.device) -> None:
        """Wait until all ranks have loaded their parts and join their process group; `Unavailable` if one fails."""
        until = time.monotonic() + START_SECONDS
        for index in range(1, self._size):
            while not self._store.check([_ready(index)]):
                ended = self._launcher.ended()
                if ended is not None or time.monotonic() > until:
                    reason = ended or f"not ready after {START_SECONDS:g} seconds"
                    raise Unavailable(f"rank {index} of the model did not start: {reason}")
                time.sleep(WATCH_SECONDS / 10)
            failure = self._store.get(_ready(index)).decode()
            if failure:
                raise Unavailable(f"rank {index} of the model cannot be loaded: {failure}")
        join(self._store, Rank(0, self._size), device)
        threading.Thread(target=self._watch, name="attn-ranks", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether all ranks are running."""
        return self.leader.ended is None

    def stop(self) -> None:
        """End the other ranks."""
        self._stopping.set()
        initialized = dist.is_initialized()
        wait = STOP_SECONDS if initialized and self.alive else 0.0
        if wait:
            self.leader.stop()
        self._launcher.stop(wait)
        if initialized:
            dist.destroy_process_group()

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_SECONDS):
            ended = self._launcher.ended()
            if ended is not None and not self._stopping.is_set():
                self.leader.end(Unavailable(f"{LOST}: {ended}"))
                return


def run_rank(task: RankTask) -> None:
    """Run a rank: load its part of the model and follow the first rank until that stops. Raises what fails before."""
    host, _, port = task.address.rpartition(":")
    store = Store(host, int(port), is_master=False, timeout=timedelta(seconds=START_SECONDS))
    config, rank = task.config, Rank(task.index, task.config.tensor_parallel_size)
    torch.set_num_threads(rank_threads(config))
    try:
        loaded = load_part(Path(task.folder), config, task.index)
    except Exception as error:
        with cleaning_up("the message to the first rank"):
            store.set(_ready(task.index), error.message if isinstance(error, AttnError) else repr(error))
        raise
    store.set(_ready(task.index), "")
    join(store, rank, loaded.device)
    try:
        use_kernel(loaded.model, config.kernel)
        with_kv_cache_memory(config, loaded.model, loaded.device, drafts=config.draft_model is not None)
        follower = Follower(loaded.model)
        messages = Messages(store)
        while not follower.stopped:
            follower.follow(messages.receive())
    finally:
        with cleaning_up("the process group"):
            dist.destroy_process_group()


def listen(ip: str) -> tuple[Any, str]:
    """Serve a store at a free port of the address `ip` only; returns the store and its "ip:port" address."""
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.bind((ip, 0))
        probe.listen()
        port = probe.getsockname()[1]
        store = Store(
            ip,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_SECONDS),
            master_listen_fd=probe.detach(),
        )
    return store, f"{ip}:{port}"


def join(store: Any, rank: Rank, device: torch.device) -> None:
    """Initialize the default process group with all ranks: NCCL for CUDA devices, else Gloo."""
    if store.host.startswith(LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=START_SECONDS),
    )


def _ready(index: int) -> str:
    return f"ready/{index}"
