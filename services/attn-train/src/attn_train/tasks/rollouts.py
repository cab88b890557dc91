"""Completions that several engines sample: those of the workers that train, or of a running server.

Draws depend on the seed of a prompt and the place of a token alone, so that the same completions are sampled whoever
samples them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from attn_core.errors import AttnError, Unavailable
from attn_models.loading.models import in_layout
from attn_models.lora import merged_adapter
from attn_models.tokenizers import Tokenizer
from attn_schema import ConnectionOptions, Prompt
from attn_schema.training import TrainingConfig
from safetensors.torch import save
from torch import Tensor

from attn_train.base_model import LORA, adapter_of
from attn_train.collectives import all_gather_texts, require_no_failure
from attn_train.doing import doing
from attn_train.process_group import Group
from attn_train.tasks.base import OnBatch
from attn_train.tasks.on_policy import Completion, Sampler, sampled, sampling_params

if TYPE_CHECKING:
    from attn_client import AsyncClient, ClientSettings

CONCURRENT = 64
"""Prompts that are sampled from at once on a server."""
PATIENCE_SECONDS = 120.0
"""How long a server may be away before the attempt is given up."""

Prompts = Mapping[int, Sequence[int]]


class RolloutsLost(Unavailable):
    """The server that samples has not answered for long; another attempt goes on from the last checkpoint."""

    reason = "ROLLOUTS_LOST"


def sampler_of(config: TrainingConfig, layout: str, group: Group) -> Sampler:
    """Return what samples for a job: a server, or each of its workers from a part of the prompts.

    `layout` is that of the base model's folder.
    """
    if config.on_policy.rollout_server:
        return ServedSampler(group, layout)
    return SharedSampler(group) if group.workers > 1 else Sampler()


@dataclass(frozen=True)
class SharedSampler(Sampler):
    """Each worker samples from its part of the prompts, and gets the completions of the others."""

    group: Group

    def __call__(
        self, model: Any, tokenizer: Tokenizer, prompts: Prompts, config: TrainingConfig, count: int, on_batch: OnBatch
    ) -> list[Completion]:
        """See `Sampler`."""
        numbers, workers = list(prompts), self.group.workers
        mine = {number: prompts[number] for number in numbers[self.group.rank :: workers]}

        def own() -> list[Completion]:
            return sampled(model, tokenizer, mine, config, count, on_batch) if mine else []

        parts = _by_all(self.group, own)
        firsts = [(parts[place % workers], place // workers * count) for place in range(len(numbers))]
        return [one for part, first in firsts for one in part[first : first + count]]

    def summed(self, value: Tensor) -> Tensor:
        """See `Sampler.summed`."""
        return self.group.summed_on_hosts(value)


@dataclass(frozen=True)
class ServedSampler(SharedSampler):
    """The engines of a running server sample, after they have got the weights of the leading worker."""

    layout: str

    def differs(self, config: TrainingConfig) -> bool:
        """See `Sampler.differs`: the server has merged weights, and log probabilities of temperature 1."""
        return config.lora.lora_rank is not None or config.on_policy.temperature != 1

    def __call__(
        self, model: Any, tokenizer: Tokenizer, prompts: Prompts, config: TrainingConfig, count: int, on_batch: OnBatch
    ) -> list[Completion]:
        """See `Sampler`; raises `RolloutsLost` if the server is away for long."""
        del tokenizer  # that of the base model, which the server has, too

        def own() -> list[Completion]:
            if not self.group.leads:
                return []
            with doing(f"the rollout server {config.on_policy.rollout_server}"):
                return asyncio.run(_asked(self._file(model), prompts, config, count, on_batch))

        return _by_all(self.group, own)[0]

    def _file(self, model: Any) -> bytes:
        """Return a safetensors file of the weights, into which an adapter is merged."""
        adapter = adapter_of(model)
        with nullcontext() if adapter is None else merged_adapter(model, adapter):
            _, tensors = in_layout(model, self.layout)
            own = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{LORA}.")}
            return save({name: tensor.detach().cpu().contiguous() for name, tensor in own.items()})


def _by_all(group: Group, sample: Callable[[], list[Completion]]) -> list[list[Completion]]:
    """Return what each worker has sampled, on all of them; raises in all of them if one failed. A collective."""
    failure: AttnError | None = None
    found: list[Completion] = []
    try:
        found = sample()
    except AttnError as error:
        failure = error
    require_no_failure(failure, group.hosts, RolloutsLost)
    texts = all_gather_texts(msgspec.json.encode(found).decode(), group.hosts)
    return [msgspec.json.decode(text, type=list[Completion]) for text in texts]


async def _asked(
    file: bytes, prompts: Prompts, config: TrainingConfig, count: int, on_batch: OnBatch
) -> list[Completion]:
    """Give the weights in a safetensors file to the server, then ask it for completions."""
    from attn_client import AsyncClient  # gRPC, which no other job needs

    on_policy, room = config.on_policy, asyncio.Semaphore(CONCURRENT)
    async with AsyncClient(connection(on_policy.rollout_server)) as client:

        async def completed(number: int, ids: Sequence[int]) -> list[Completion]:
            found = [Completion() for _ in range(count)]
            prompt, params = Prompt(token_ids=tuple(ids)), sampling_params(config, number, count)
            params = params.replace(temperature=on_policy.temperature)
            async with room:
                async for delta in client.generate(on_policy.rollout_model, prompt, params):
                    found[delta.index].take(delta)
                    on_batch()
            return found

        try:
            await _hand_over(client, on_policy.rollout_model, file, on_batch)
            groups = await asyncio.gather(*(completed(number, ids) for number, ids in prompts.items()))
        except Unavailable as error:
            raise RolloutsLost(f"the rollout server {on_policy.rollout_server}: {error.message}") from error
    return [one for group in groups for one in group]


async def _hand_over(client: AsyncClient, model: str, file: bytes, on_batch: OnBatch) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            await client.models.update_weights(model, file, shutdown_timeout=0.0)
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            on_batch()
            await asyncio.sleep(1.0)
        else:
            return


def connection(address: str) -> ClientSettings:
    """Return how workers connect to a server: with the files of `ATTN_TOKEN_FILE` and `ATTN_TLS_CA`, if set."""
    from attn_client import ClientSettings

    token, authority = (os.environ.get(name) for name in ("ATTN_TOKEN_FILE", "ATTN_TLS_CA"))
    return ClientSettings.of(
        ConnectionOptions(
            address=address,
            token_file=None if token is None else Path(token),
            tls_ca=None if authority is None else Path(authority),
        )
    )
