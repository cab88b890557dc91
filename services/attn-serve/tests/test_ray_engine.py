"""The engine in a Ray actor answers as the one in this process, and comes back when it is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from attn_core.errors import DeadlineExceeded, InvalidValue, Unavailable, WrongState
from attn_engine.host import EmbedTask, TextTask
from attn_gateway import Cluster, ClusterSettings
from attn_gateway.ray_gpus import known_gpus
from attn_models.weights.manifest import fingerprint
from attn_schema import AttentionMapsRequest, EngineConfig, Prompt, SamplingParams, ScoringParams
from attn_serve.engine_client import EngineClient
from attn_serve.in_process import InProcessBackend
from attn_serve.ray_backend import RayBackend
from low_rank import make_adapter
from mixed_requests import mixed_tasks, outcome

ONE_THREAD = EngineConfig(num_threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    made = Cluster(ClusterSettings(cpus=2, home=tmp_path_factory.mktemp("ray-home")))
    await made.start()
    yield made
    await made.stop()


def near_engine(folder: Path) -> EngineClient:
    return EngineClient(InProcessBackend(folder, ONE_THREAD))


def far_engine(folder: Path) -> EngineClient:
    return EngineClient(RayBackend(folder.name, folder, ONE_THREAD))


def generation(tokens: int = 24, n: int = 1) -> TextTask:
    return TextTask(prompt=Prompt(text="To be"), params=SamplingParams(max_new_tokens=tokens, n=n))


async def text_of(engine: EngineClient, wanted: TextTask) -> str:
    return "".join([delta.text async for delta in engine.generate(wanted)])


async def eventually(engine: EngineClient) -> str:
    """The answer of an engine that was killed, when it has been started again."""
    for _ in range(300):
        try:
            return await text_of(engine, generation())
        except Unavailable:
            await asyncio.sleep(0.1)
    pytest.fail("the engine did not come back")


@pytest.mark.ray
@pytest.mark.asyncio(loop_scope="module")
class TestRayEngine:
    """One cluster for all."""

    async def test_it_answers_as_the_engine_in_this_process(self, cluster: Cluster, home: Path) -> None:
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

    async def test_an_encoder_in_an_actor_embeds_as_in_this_process(self, cluster: Cluster, home: Path) -> None:
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

    async def test_leaving_ends_scores_and_embeddings_in_the_actor(self, cluster: Cluster, home: Path) -> None:
        """Whoever is cancelled while the actor computes for it leaves nothing running there."""
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

    async def test_a_users_error_crosses_the_actor_as_itself(self, cluster: Cluster, home: Path) -> None:
        engine = far_engine(home / "models" / "tiny")
        await engine.start()
        with pytest.raises(InvalidValue, match="at least one token"):
            await text_of(engine, TextTask(prompt=Prompt(text=""), params=SamplingParams()))
        await engine.stop(0)
        with pytest.raises(Unavailable):
            await engine.tokenize(Prompt(text="x"))

    async def test_a_gpu_that_ray_does_not_know_is_refused_before_an_actor_starts(
        self, cluster: Cluster, home: Path
    ) -> None:
        if known_gpus():
            pytest.skip("this machine has a GPU")
        folder = home / "models" / "tiny"
        for device in ("cuda", "cuda:1"):
            engine = EngineClient(RayBackend("tiny", folder, ONE_THREAD.replace(device=device)))
            with pytest.raises(InvalidValue, match="Ray finds no GPU") as error:
                await engine.start()
            assert error.value.metadata["field"] == "device"
        engine = EngineClient(RayBackend("tiny", folder, ONE_THREAD.replace(device="mps")))
        with pytest.raises(InvalidValue, match="built without MPS"):
            await engine.start()
        await engine.stop(0)

    async def test_a_completion_left_early_frees_what_it_held(self, cluster: Cluster, home: Path) -> None:
        engine = far_engine(home / "models" / "tiny")
        await engine.start()
        chunks = engine.generate(generation(240, n=8))
        await anext(chunks)
        await chunks.aclose()
        async with asyncio.timeout(60):
            while True:
                load = await engine.stats()
                if load.running == load.kv_tokens_used == 0:
                    break
                await asyncio.sleep(0.02)
        assert load.generated_tokens < 8 * 240
        await engine.stop(0)

    async def test_an_engine_that_comes_back_has_the_adapters_that_it_had(self, cluster: Cluster, home: Path) -> None:
        make_adapter(home / "models" / "tiny", "third", 3)
        engine = far_engine(home / "models" / "tiny")
        await engine.start()
        adapted = await engine.load_adapter("third", home / "models" / "third")
        before = await text_of(adapted, generation())
        assert before != await text_of(engine, generation())
        os.kill(await engine.backend.pid(), signal.SIGKILL)
        assert await eventually(adapted) == before
        await engine.stop(0)

    async def test_an_engine_that_comes_back_serves_what_was_loaded_or_refuses_it_by_name(
        self, cluster: Cluster, home: Path, tmp_path: Path
    ) -> None:
        """An adapter whose files have changed is refused, and the model goes on; then the model's files change."""
        shutil.copytree(home / "models" / "tiny", tmp_path / "tiny")
        for seed, name in enumerate(("fourth", "other")):
            make_adapter(tmp_path / "tiny", name, seed)
        config = ONE_THREAD.replace(fingerprint=fingerprint(tmp_path / "tiny"))
        engine = EngineClient(RayBackend("kept", tmp_path / "tiny", config))
        await engine.start()
        adapted = await engine.load_adapter("fourth", tmp_path / "fourth")
        plain = await text_of(engine, generation())
        for source, target, again in (("other", "fourth", plain), ("fourth-merged", "tiny", None)):
            for file in (tmp_path / source).iterdir():
                (tmp_path / target / file.name).write_bytes(file.read_bytes())
            os.kill(await engine.backend.pid(), signal.SIGKILL)
            if again is not None:
                assert await eventually(engine) == again
            with pytest.raises(WrongState, match=target):
                await eventually(adapted if again is not None else engine)
        await engine.stop(0)

    async def test_the_streams_of_a_killed_engine_go_on_when_it_is_back(self, cluster: Cluster, home: Path) -> None:
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
        os.kill(await engine.backend.pid(), signal.SIGKILL)
        found = dict(zip(wanted, await asyncio.wait_for(asyncio.gather(*running), timeout=120), strict=True))
        assert [name for name in wanted if found[name].said != wanted[name]] == []
        assert max(one.resumptions for one in found.values()) == 1
        os.kill(await engine.backend.pid(), signal.SIGKILL)
        with pytest.raises(DeadlineExceeded):
            await text_of(engine, replace(generation(250), timeout=0.4))
        await engine.stop(0)
