"""Weights are replaced over the wire, all or none; a model that sleeps frees its memory and wakes up as it was."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking_inference import until
from attn_client import AsyncClient, ClientSettings
from attn_core.errors import (
    CheckpointInvalid,
    Incompatible,
    InvalidValue,
    OutOfCapacity,
    PermissionDenied,
    Unavailable,
    WrongState,
)
from attn_engine.client import EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_gateway import GatewaySettings, serving
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import EngineConfig, ModelState, Prompt, SamplingParams
from attn_schema.decoder import DecoderConfig
from attn_serve.child_process import ChildProcess
from local_replicas import LocalGroup
from low_rank import make_adapter
from safetensors import safe_open
from safetensors.torch import load, save

GREEDY = SamplingParams(max_new_tokens=16, temperature=0)


def changed(folder: Path, **others: Any) -> bytes:
    """The file of a folder's weights, moved a little; `others` replace weights, or drop them where None."""
    weights = load((folder / "model.safetensors").read_bytes())
    torch.manual_seed(0)
    moved = {name: weight + torch.randn_like(weight) * 0.3 for name, weight in weights.items()} | others
    return save({name: weight for name, weight in moved.items() if weight is not None})


def served_elsewhere(folder: Path, data: bytes, place: Path) -> Path:
    """A folder of the same model with these weights."""
    place.mkdir()
    for file in folder.iterdir():
        if file.name != "manifest.json":
            (place / file.name).write_bytes(file.read_bytes())
    (place / "model.safetensors").write_bytes(data)
    return place


@pytest.fixture
async def client(inference: Any, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    file = tmp_path / "tokens"
    file.write_text("op\none tenant=ann\n")
    file.chmod(0o600)
    async with (
        serving([inference], GatewaySettings(port=0, token_file=file)) as running,
        AsyncClient(ClientSettings(address=running.address, token="op")) as opened,
    ):
        opened.address = running.address
        yield opened


async def text(client: AsyncClient, prompt: str = "To be", model: str = "tiny") -> str:
    return (await client.complete(model, prompt, GREEDY)).text


async def test_new_weights_give_the_tokens_of_a_model_that_was_loaded_with_them(
    client: AsyncClient, home: Path, tmp_path: Path
) -> None:
    folder = home / "models" / "tiny"
    data = changed(folder)
    before = await text(client)
    await client.models.load("other", source=str(served_elsewhere(folder, data, tmp_path / "other")))
    wanted = await text(client, model="other")
    model = await client.models.update_weights("tiny", data)
    assert model.state is ModelState.SERVING
    assert await text(client) == wanted != before, "the prefix that was cached is not used"
    await client.models.sleep("tiny")
    with pytest.raises(Unavailable, match="sleeping"):
        await text(client)
    with pytest.raises(Unavailable, match="sleeping"):
        await client.models.update_weights("tiny", data)
    assert (await client.models.sleep("tiny")).state is ModelState.SLEEPING
    assert (await client.models.wake_up("tiny")).state is ModelState.SERVING
    assert await text(client) == wanted, "it wakes up with the weights that it had"


async def test_weights_that_do_not_fit_change_nothing(client: AsyncClient, home: Path) -> None:
    folder = home / "models" / "tiny"
    with safe_open(folder / "model.safetensors", "pt") as file:
        name = sorted(file.keys())[0]
    wrong = {
        "missing": changed(folder, **{name: None}),
        "no such weight": changed(folder, extra=torch.zeros(2)),
        name: changed(folder, **{name: torch.zeros(3)}),
        "I32": changed(folder, **{name: load((folder / "model.safetensors").read_bytes())[name].to(torch.int32)}),
        "not a safetensors file": b"weights",
    }
    before = await text(client)
    for said, data in wrong.items():
        with pytest.raises(CheckpointInvalid, match=said):
            await client.models.update_weights("tiny", data)
    with pytest.raises(InvalidValue, match="at most"):
        await client.models.update_weights("tiny", bytes(10 * 2**20))
    assert await text(client) == before


async def test_only_admins_replace_weights_and_only_without_adapters(client: AsyncClient, home: Path) -> None:
    async with AsyncClient(ClientSettings(address=client.address, token="one")) as tenant:
        calls = tenant.models.sleep("tiny"), tenant.models.wake_up("tiny"), tenant.models.update_weights("tiny", b"x")
        for call in calls:
            with pytest.raises(PermissionDenied, match="admins"):
                await call
    make_adapter(home / "models" / "tiny", "fine", seed=1)
    await client.models.load("fine", base_model="tiny")
    with pytest.raises(Incompatible, match="adapters"):
        await client.models.update_weights("tiny", changed(home / "models" / "tiny"))


@pytest.mark.parametrize("seconds", [30.0, 0.0])
async def test_requests_that_run_finish_with_the_old_weights_or_are_aborted(
    client: AsyncClient, home: Path, seconds: float
) -> None:
    alone = (await client.complete("tiny", "To be", SamplingParams(max_new_tokens=200, ignore_eos=True, seed=1))).text
    stream = client.generate("tiny", "To be", SamplingParams(max_new_tokens=200, ignore_eos=True, seed=1))
    told = [(await anext(stream)).text]
    await client.models.update_weights("tiny", changed(home / "models" / "tiny"), shutdown_timeout=seconds)
    with nullcontext() if seconds else pytest.raises(WrongState, match="aborted"):
        async for delta in stream:
            told.append(delta.text)  # noqa: PERF401 -- those before the error count
    assert alone.startswith("".join(told))
    assert ("".join(told) == alone) is (seconds > 0)


async def said(engine: EngineClient) -> str:
    return "".join(
        [delta.text async for delta in engine.generate(TextTask(prompt=Prompt(text="To be"), params=GREEDY))]
    )


async def refuses(*_: object) -> None:
    raise OutOfCapacity("no memory for a second model")


async def said_by_each(replicas: LocalGroup) -> list[str]:
    """What each replica says, asked on its own."""
    task, found = TextTask(prompt=Prompt(text="To be"), params=GREEDY), []
    for server in replicas.servers:
        asked = replicas._replicas[server.address.id]
        own = replace(task, id=server.address.id)
        found.append("".join([delta.text async for delta in replicas.streams.follow(own, asked.submit, asked.cancel)]))
    return found


async def test_replicas_get_weights_and_sleep_all_or_none_and_so_do_later_ones(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "models" / "tiny"
    data, config = changed(folder), EngineConfig(num_threads=1)
    alone = InProcess(served_elsewhere(folder, data, tmp_path / "other"), config)
    await alone.start()
    wanted = await said(alone)
    await alone.stop(0)
    replicas = LocalGroup("two", folder, config)
    first, second = await replicas.add(), await replicas.add()
    await replicas.start()
    before = await said(replicas)

    with monkeypatch.context() as patched:
        patched.setattr(second.engine, "open_staged", refuses)
        with pytest.raises(OutOfCapacity):
            await replicas.update_weights(data, 0, 5.0, last=True)
    assert await said_by_each(replicas) == [before, before]
    assert first.engine._opened is None, "what is not used is freed"
    await replicas.update_weights(data, 0, 5.0, last=True)
    await replicas.kill(first)
    third = await replicas.add()
    await until(lambda: replicas.replicas == 2)
    assert before != wanted
    assert await said_by_each(replicas) == [wanted, wanted]
    await replicas.sleep(5.0)
    await replicas.add()
    await until(lambda: replicas.replicas == 3)
    assert all(server.engine._host is None for server in replicas.servers)
    with monkeypatch.context() as patched:
        patched.setattr(third.engine, "wake_up", refuses)
        with pytest.raises(OutOfCapacity):
            await replicas.wake_up()
    assert all(server.engine._host is None for server in replicas.servers)
    await replicas.wake_up()
    assert await said_by_each(replicas) == [wanted] * 3
    joining = LocalGroup("two", folder, config)
    joining.servers = replicas.servers
    with pytest.raises(WrongState, match="another gateway"):
        await joining.start()
    await replicas.stop(0)
    for server in replicas.servers:
        await server.drain(0)


async def test_a_stream_of_a_lost_replica_does_not_go_on_with_other_weights(home: Path) -> None:
    folder, config = home / "models" / "tiny", EngineConfig(num_threads=1)
    replicas = LocalGroup("two", folder, config)
    first = await replicas.add()
    await replicas.start()
    stream = replicas.generate(
        TextTask(prompt=Prompt(text="To be"), params=SamplingParams(max_new_tokens=200, ignore_eos=True))
    )
    await anext(stream)
    await replicas.kill(first)
    second = await replicas.add()
    await until(lambda: list(replicas._replicas) == [second.address.id])
    await replicas.update_weights(changed(folder), 0, 5.0, last=True)
    with pytest.raises(WrongState, match="other weights"):
        async for _ in stream:
            pass
    await replicas.stop(0)
    await second.drain(0)


async def test_a_child_frees_its_memory_and_is_not_restarted_with_old_weights(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "wide", character_tokenizer("abcdefghijklmnopqrstuvwxyzTB ")
    config = DecoderConfig(vocab_size=29, max_seq_len=64, hidden_size=512, num_layers=4, num_heads=4, mechanism="mha")
    save_model(folder, Decoder(config), tokenizer)
    engine = ChildProcess("wide", folder, EngineConfig(num_threads=1))
    failures: list[str] = []
    engine.on_failure = failures.append
    await engine.start()
    before, awake = await said(engine), (await engine.stats()).resident_memory_bytes
    await engine.sleep(5.0)
    asleep = (await engine.stats()).resident_memory_bytes
    assert awake - asleep > 30 * 2**20, "most of the weights"
    await engine.wake_up()
    assert await said(engine) == before
    data = changed(folder)
    half = len(data) // 2
    await engine.update_weights(data[:half], 0, 5.0, last=False)
    with pytest.raises(InvalidValue, match=str(half)):
        await engine.update_weights(data[half + 1 :], half + 1, 5.0, last=True)
    assert await said(engine) == before
    await engine.update_weights(data[half:], half, 5.0, last=True)
    assert await said(engine) != before
    os.kill((await engine.pids())[0], signal.SIGKILL)
    await until(lambda: failures)
    assert "updated weights" in failures[0]
    with pytest.raises(Unavailable, match="load the model again"):
        await engine.submit(TextTask(prompt=Prompt(text="To be"), params=GREEDY))
    await asyncio.wait_for(engine.stop(0), 10)
