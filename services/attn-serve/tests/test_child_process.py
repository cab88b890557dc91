"""The engine in a child process answers as the one in this process, and comes back when it is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import psutil
import pytest
from asking_inference import until
from attn_core.errors import AttnError, DeadlineExceeded, InvalidValue, OutOfCapacity, Unavailable, WrongState
from attn_engine.client import EmbedTask, EngineClient, TextTask
from attn_engine.in_process import InProcess
from attn_models.weights.manifest import fingerprint
from attn_schema import AttentionMapsRequest, EngineConfig, ModelState, Prompt, SamplingParams, ScoringParams, resuming
from attn_serve import child_process, replica_client
from attn_serve.child_process import ChildProcess
from attn_serve.placement import GpuShares, fits_here
from attn_serve.served_models import ServedModels
from attn_serve.sources import ModelSources
from low_rank import make_adapter
from mixed_requests import mixed_tasks, outcome

ONE_THREAD = EngineConfig(num_threads=1)


def near_engine(folder: Path) -> EngineClient:
    return InProcess(folder, ONE_THREAD)


def far_engine(folder: Path) -> EngineClient:
    return ChildProcess(folder.name, folder, ONE_THREAD)


def generation(tokens: int = 24, n: int = 1) -> TextTask:
    return TextTask(prompt=Prompt(text="To be"), params=SamplingParams(max_new_tokens=tokens, n=n))


async def text_of(engine: EngineClient, wanted: TextTask) -> str:
    return "".join([delta.text async for delta in engine.generate(wanted)])


async def test_it_answers_as_the_engine_in_this_process(home: Path) -> None:
    folder = home / "models" / "tiny"
    near, far = near_engine(folder), far_engine(folder)
    assert await near.start() == await far.start()
    prompt = Prompt(text="To be or not")
    assert await text_of(near, generation()) == await text_of(far, generation())
    assert await near.tokenize(prompt) == await far.tokenize(prompt)
    scored = [TextTask(prompt=prompt, params=ScoringParams(top_logprobs=2))]
    assert await near.score(scored) == await far.score(scored)
    maps = AttentionMapsRequest(model="tiny", prompt=prompt)
    assert await near.attention_maps(maps) == await far.attention_maps(maps)
    await near.stop(0)
    await far.stop(0)


async def test_an_encoder_in_a_child_embeds_as_in_this_process(home: Path) -> None:
    folder = home / "models" / "tiny-bert"
    near, far = near_engine(folder), far_engine(folder)
    assert await near.start() == await far.start()
    wanted = EmbedTask(texts=("abc", "d"), timeout=60)
    assert await near.embed(wanted) == await far.embed(wanted)
    assert await near.tokenize(Prompt(text="abc")) == await far.tokenize(Prompt(text="abc"))
    with pytest.raises(InvalidValue, match=r"texts\[1\]"):
        await far.embed(EmbedTask(texts=("a", "a" * 13)))
    await near.stop(0)
    await far.stop(0)


async def test_leaving_ends_scores_and_embeddings_in_the_child(home: Path) -> None:
    """Whoever is cancelled while the child computes for it leaves nothing running there."""
    writer = far_engine(home / "models" / "tiny")
    encoder = far_engine(home / "models" / "tiny-bert")
    await writer.start()
    await encoder.start()
    prompt = Prompt(text="x" * 200)
    scored = [TextTask(prompt=prompt, params=ScoringParams(), tenant="ann") for _ in range(200)]
    embedded = EmbedTask(texts=("abcd abcd",) * 50_000)
    for engine, work in ((writer, writer.score(scored)), (encoder, encoder.embed(embedded))):
        task = asyncio.create_task(work)
        while (await engine.stats()).computed_tokens == 0:
            assert not task.done()
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while True:
            load = await engine.stats()
            if load.running + load.waiting == 0:
                break
            await asyncio.sleep(0.005)
        assert load.computed_tokens < 9 * 50_000 / 2
        await engine.stop(0)


async def test_a_users_error_crosses_the_process_as_itself(home: Path) -> None:
    engine = far_engine(home / "models" / "tiny")
    await engine.start()
    with pytest.raises(InvalidValue, match="at least one token"):
        await text_of(engine, TextTask(prompt=Prompt(text=""), params=SamplingParams()))
    await engine.stop(0)
    with pytest.raises(Unavailable):
        await engine.tokenize(Prompt(text="x"))


async def test_a_completion_left_early_frees_what_it_held(home: Path) -> None:
    engine = far_engine(home / "models" / "tiny")
    await engine.start()
    chunks = engine.generate(generation(240, n=64))
    await anext(chunks)
    await chunks.aclose()
    async with asyncio.timeout(60):
        while True:
            load = await engine.stats()
            if load.running == load.kv_tokens_used == 0:
                break
            await asyncio.sleep(0.02)
    assert load.generated_tokens < 64 * 240
    await engine.stop(0)


async def test_an_engine_that_comes_back_has_the_adapters_that_it_had(home: Path) -> None:
    make_adapter(home / "models" / "tiny", "third", 3)
    engine = far_engine(home / "models" / "tiny")
    await engine.start()
    await engine.load_adapter("third", home / "models" / "third")
    adapted = replace(generation(), adapter="third")
    before = await text_of(engine, adapted)
    assert before != await text_of(engine, generation())
    os.kill((await engine.pids())[0], signal.SIGKILL)
    assert await text_of(engine, adapted) == before
    await engine.stop(0)


async def test_an_engine_that_comes_back_serves_what_was_loaded_or_refuses_it_by_name(
    home: Path, tmp_path: Path
) -> None:
    """An adapter whose files have changed is refused, and the model goes on; then the model's files change."""
    shutil.copytree(home / "models" / "tiny", tmp_path / "tiny")
    for seed, name in enumerate(("fourth", "other")):
        make_adapter(tmp_path / "tiny", name, seed)
    engine = ChildProcess("kept", tmp_path / "tiny", ONE_THREAD.replace(fingerprint=fingerprint(tmp_path / "tiny")))
    await engine.start()
    await engine.load_adapter("fourth", tmp_path / "fourth")
    plain = await text_of(engine, generation())
    for source, target, again in (("other", "fourth", plain), ("fourth-merged", "tiny", None)):
        for file in (tmp_path / source).iterdir():
            (tmp_path / target / file.name).write_bytes(file.read_bytes())
        os.kill((await engine.pids())[0], signal.SIGKILL)
        await until(lambda: not engine.replicas)
        if again is not None:
            assert await text_of(engine, generation()) == again
        with pytest.raises(WrongState, match=target):
            await text_of(engine, generation() if again is None else replace(generation(), adapter="fourth"))
    await engine.stop(0)


async def test_the_streams_of_a_killed_engine_go_on_when_it_is_back(home: Path) -> None:
    """Whatever was asked for, the tokens are those of an engine that lived."""
    folder = home / "models" / "tiny"
    near, engine = near_engine(folder), far_engine(folder)
    await near.start()
    await engine.start()
    wanted = {name: (await outcome(near, task)).said for name, task in mixed_tasks().items()}
    await near.stop(0)
    begun = asyncio.Semaphore(0)
    running = [asyncio.create_task(outcome(engine, task, begun)) for task in mixed_tasks().values()]
    for _ in range(3):
        await begun.acquire()
    os.kill((await engine.pids())[0], signal.SIGKILL)
    found = dict(zip(wanted, await asyncio.wait_for(asyncio.gather(*running), timeout=120), strict=True))
    assert [name for name in wanted if found[name].said != wanted[name]] == []
    assert max(one.resumptions for one in found.values()) == 1
    os.kill((await engine.pids())[0], signal.SIGKILL)
    with pytest.raises(DeadlineExceeded):
        await text_of(engine, replace(generation(250), timeout=0.4))
    await engine.stop(0)


async def test_three_killed_children_lose_none_of_16_mixed_streams(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "DEATHS_SECONDS", 0.0)
    # A slow chip computes no token of some streams before their engine is killed again.
    monkeypatch.setattr(resuming, "MAX_BREAKS", 10)
    engine = far_engine(home / "models" / "tiny")
    await engine.start()
    wanted = {name: (await outcome(engine, task)).said for name, task in mixed_tasks().items()}
    names = list(islice(cycle(wanted), 16))
    lost, resumed, killed = [], 0, 0

    async def stream(name: str) -> None:
        nonlocal resumed
        while killed < 3:
            found = await outcome(engine, mixed_tasks()[name])
            resumed += found.resumptions > 0
            if found.said != wanted[name]:
                lost.append(name)

    running = [asyncio.create_task(stream(name)) for name in names]
    while killed < 3:
        await until(lambda: engine.replicas and len(engine.streams) == 16)
        await asyncio.sleep(0.05)
        os.kill((await engine.pids())[0], signal.SIGKILL)
        killed += 1
        await until(lambda: not engine.replicas)
    await asyncio.wait_for(asyncio.gather(*running), timeout=300)
    await engine.stop(0)
    assert not lost
    assert resumed >= 3


async def test_a_child_that_hangs_is_replaced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, not killed: its connection stays open and nothing comes."""
    engine = far_engine(home / "models" / "tiny")
    await engine.start()
    wanted = await text_of(engine, generation(200))
    monkeypatch.setattr(replica_client, "SILENCE_SECONDS", 2.0)
    pids = await engine.pids()
    running = asyncio.create_task(text_of(engine, generation(200)))
    await until(lambda: len(engine.streams))
    os.kill(pids[0], signal.SIGSTOP)
    assert await asyncio.wait_for(running, timeout=120) == wanted
    await until(lambda: engine.replicas)
    assert await engine.pids() != pids
    assert not psutil.pid_exists(pids[0])
    await engine.stop(0)


async def test_a_model_whose_child_dies_three_times_has_failed_and_others_go_on(home: Path) -> None:
    """Its callers read the last words; it can be loaded again."""

    def make(name: str, folder: Path, config: EngineConfig, _: object) -> EngineClient:
        return ChildProcess(name, folder, config)

    served = ServedModels(ModelSources(home), make)
    try:
        await served.load("tiny", "", ONE_THREAD)
        await served.load("other", "tiny", ONE_THREAD)
        engine = served.serving("tiny").engine
        for _ in range(3):
            await until(lambda: engine.replicas)
            os.kill((await engine.pids())[0], signal.SIGKILL)
            await until(lambda: not engine.replicas)
        await until(lambda: served.find("tiny").info.state is ModelState.FAILED)
        assert "SIGKILL" in served.find("tiny").info.state_detail
        with pytest.raises(Unavailable, match="SIGKILL"):
            served.serving("tiny")
        with pytest.raises(Unavailable, match="SIGKILL"):
            await text_of(engine, generation())
        wanted = await text_of(served.serving("other").engine, generation())
        await served.load("tiny", "", ONE_THREAD)
        assert await text_of(served.serving("tiny").engine, generation()) == wanted
    finally:
        await served.stop(0)


async def test_a_model_that_does_not_load_says_why_and_leaves_no_process(home: Path, tmp_path: Path) -> None:
    before = psutil.Process().children()
    with pytest.raises(AttnError, match=tmp_path.name):
        await far_engine(tmp_path).start()
    assert psutil.Process().children() == before


def test_a_child_ends_with_its_parent(home: Path) -> None:
    program = f"""
import asyncio, os, pathlib, signal
from attn_schema import EngineConfig
from attn_serve.child_process import ChildProcess
async def main():
    engine = ChildProcess("tiny", pathlib.Path({str(home / "models" / "tiny")!r}), EngineConfig(num_threads=1))
    await engine.start()
    print((await engine.pids())[0], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    pid = int(done.stdout)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    assert not alive


def test_a_gpu_is_shared_by_as_many_engines_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    shares, half = GpuShares(), EngineConfig(device="cuda", gpu_memory_utilization=0.6)
    with shares.taken(half) as first, shares.taken(half) as second:
        assert [first, second] == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "7"}]
        with pytest.raises(OutOfCapacity, match=r"0\.4"), shares.taken(half):
            pass
        with shares.taken(EngineConfig(device="auto", gpu_memory_utilization=0.4)) as third:
            assert third == first
    with shares.taken(half) as again:
        assert again == first
    assert fits_here(EngineConfig(device="auto", tensor_parallel_size=2))
    assert not fits_here(EngineConfig(device="cuda", tensor_parallel_size=3))
    assert fits_here(EngineConfig(device="cpu", tensor_parallel_size=3))
