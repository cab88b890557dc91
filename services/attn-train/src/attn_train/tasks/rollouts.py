"""Completions that several engines sample: those of the workers that train, or of a running server.

Draws depend on the seed of a prompt and the place of a token alone, so that the same completions are sampled whoever
samples them.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from attn_client import AsyncClient, ClientSettings
from attn_core.errors import AttnError, Unavailable
from attn_models.loading.models import in_layout
from attn_models.tokenizers import Tokenizer
from attn_schema import ConnectionOptions, Prompt
from attn_schema.training import TrainingConfig
from safetensors.torch import save

from attn_train.base_model import saved_tensors
from attn_train.collectives import all_gather_texts, require_no_failure
from attn_train.process_group import Group
from attn_train.tasks.base import OnBatch
from attn_train.tasks.on_policy import Completion, Sampler, sampled, sampling_params

CONCURRENT = 64
"""Prompts that are sampled from at once on a server."""
PATIENCE_SECONDS = 120.0
"""How long a server may be away before the attempt is given up."""

Prompts = Mapping[int, Sequence[int]]


class RolloutsLost(Unavailable):
    """The server that samples has not answered for long; another attempt goes on from the last checkpoint."""

    reason = "ROLLOUTS_LOST"


def sampler_of(config: TrainingConfig, layout: str | None, group: Group, rebuild: Callable[[], Any]) -> Sampler:
    """Return what samples for a job: a server, or its workers, each from a part of the prompts if it has all weights.

    `layout` is that of the base model's folder; `rebuild` makes a whole model on a worker that has parts of one.
    """
    if config.on_policy.rollout_server:
        return ServedSampler(layout, group, rebuild)
    whole = config.dp_shard == config.tp == config.cp == 1
    return SharedSampler(group) if group.workers > 1 and whole else sampled


@dataclass(frozen=True)
class SharedSampler:
    """Each worker samples from its part of the prompts, and gets the completions of the others."""

    group: Group

    def __call__(
        self, model: Any, tokenizer: Tokenizer, prompts: Prompts, config: TrainingConfig, count: int, on_batch: OnBatch
    ) -> list[Completion]:
        """See `Sampler`."""
        numbers = list(prompts)
        mine = {number: prompts[number] for number in numbers[self.group.rank :: self.group.workers]}

        def own() -> list[Completion]:
            return sampled(model, tokenizer, mine, config, count, on_batch) if mine else []

        found: list[Completion] = [Completion()] * (len(numbers) * count)
        for rank, part in enumerate(_by_all(self.group, own)):
            places = range(rank, len(numbers), self.group.workers)
            for place, first in zip(places, range(0, len(part), count), strict=True):
                found[place * count : place * count + count] = part[first : first + count]
        return found


@dataclass(frozen=True)
class ServedSampler:
    """The engines of a running server sample, after they have got the weights of the model."""

    layout: str | None
    group: Group
    rebuild: Callable[[], Any]

    def __call__(
        self, model: Any, tokenizer: Tokenizer, prompts: Prompts, config: TrainingConfig, count: int, on_batch: OnBatch
    ) -> list[Completion]:
        """See `Sampler`; raises `RolloutsLost` if the server is away for long."""
        del tokenizer  # that of the base model, which the server has, too
        whole = self.group.whole_model(model, saved_tensors(model), self.rebuild)

        def own() -> list[Completion]:
            if whole is None:
                return []
            _, tensors = in_layout(whole, self.layout)
            file = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
            return asyncio.run(_asked(file, prompts, config, count, on_batch))

        return _by_all(self.group, own)[0]


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
    on_policy, room = config.on_policy, asyncio.Semaphore(CONCURRENT)
    async with AsyncClient(connection(on_policy.rollout_server)) as client:

        async def completed(number: int, ids: Sequence[int]) -> list[Completion]:
            found = [Completion() for _ in range(count)]
            prompt, params = Prompt(token_ids=tuple(ids)), sampling_params(config, number, count)
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
    token, authority = (os.environ.get(name) for name in ("ATTN_TOKEN_FILE", "ATTN_TLS_CA"))
    return ClientSettings.of(
        ConnectionOptions(
            address=address,
            token_file=None if token is None else Path(token),
            tls_ca=None if authority is None else Path(authority),
        )
    )
