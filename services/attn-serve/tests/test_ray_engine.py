"""The engine in a Ray actor answers as the one in this process, and comes back when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attn_core.errors import InvalidValue, Unavailable
from attn_gateway import Cluster, ClusterSettings
from attn_serve.engines import EngineClient, InProcessEngine, RayEngine
from attn_serve.requests import EngineConfig, Generation, MapsWanted, PromptInput, Scored, TextsWanted

ONE_THREAD = EngineConfig(num_threads=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    made = Cluster(ClusterSettings(cpus=2, home=tmp_path_factory.mktemp("ray-home")))
    await made.start()
    yield made
    await made.stop()


def generation(tokens: int = 24, **sampling: object) -> Generation:
    prompt = PromptInput(text="To be")
    return Generation(id=uuid.uuid4().hex, prompt=prompt, sampling={"max_new_tokens": tokens, **sampling})


async def text_of(engine: EngineClient, wanted: Generation) -> str:
    return "".join([chunk.text async for chunk in engine.generate(wanted)])


@pytest.mark.asyncio(loop_scope="module")
class TestRayEngine:
    """One cluster for all."""

    async def test_it_answers_as_the_engine_in_this_process(self, cluster: Cluster, home: Path) -> None:
        folder = home / "models" / "tiny"
        near, far = InProcessEngine(folder, ONE_THREAD), RayEngine("tiny", folder, ONE_THREAD)
        assert await near.start() == await far.start()
        prompt = PromptInput(text="To be or not")
        assert await text_of(near, generation()) == await text_of(far, generation())
        assert await near.tokenize(prompt) == await far.tokenize(prompt)
        scored = [Scored(id=uuid.uuid4().hex, prompt=prompt, alternatives=2)]
        assert await near.score(scored) == await far.score(scored)
        assert await near.attention_maps(MapsWanted(prompt=prompt)) == await far.attention_maps(
            MapsWanted(prompt=prompt)
        )
        await near.stop(0)
        await far.stop(0)

    async def test_an_encoder_in_an_actor_embeds_as_in_this_process(self, cluster: Cluster, home: Path) -> None:
        folder = home / "models" / "tiny-bert"
        near, far = InProcessEngine(folder, ONE_THREAD), RayEngine("tiny-bert", folder, ONE_THREAD)
        assert await near.start() == await far.start()
        wanted = TextsWanted(id="two", texts=("abc", "d"), seconds=60)
        assert await near.embed(wanted) == await far.embed(wanted)
        assert await near.tokenize(PromptInput(text="abc")) == await far.tokenize(PromptInput(text="abc"))
        with pytest.raises(InvalidValue, match=r"texts\[1\]"):
            await far.embed(TextsWanted(id="long", texts=("a", "a" * 13)))
        await near.stop(0)
        await far.stop(0)

    async def test_leaving_ends_scores_and_embeddings_in_the_actor(self, cluster: Cluster, home: Path) -> None:
        """Whoever is cancelled while the actor computes for it leaves nothing running there."""
        writer = RayEngine("tiny", home / "models" / "tiny", ONE_THREAD)
        encoder = RayEngine("tiny-bert", home / "models" / "tiny-bert", ONE_THREAD)
        await writer.start()
        await encoder.start()
        prompt = PromptInput(text="x" * 200)
        scored = [Scored(id=uuid.uuid4().hex, prompt=prompt, tenant="ann") for _ in range(200)]
        embedded = TextsWanted(id="many", texts=("abcd abcd",) * 50_000)
        for engine, work in ((writer, writer.score(scored)), (encoder, encoder.embed(embedded))):
            task = asyncio.create_task(work)
            while (await engine.load()).computed_tokens == 0:
                assert not task.done()
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while True:
                load = await engine.load()
                if load.running + load.waiting == 0:
                    break
                await asyncio.sleep(0.005)
            assert load.computed_tokens < 9 * 50_000 / 2
            await engine.stop(0)

    async def test_a_users_error_crosses_the_actor_as_itself(self, cluster: Cluster, home: Path) -> None:
        engine = RayEngine("tiny", home / "models" / "tiny", ONE_THREAD)
        await engine.start()
        with pytest.raises(InvalidValue, match="temperature"):
            await text_of(engine, generation(temperature=-1.0))
        await engine.stop(0)
        with pytest.raises(Unavailable):
            await engine.tokenize(PromptInput(text="x"))

    async def test_a_completion_left_early_frees_what_it_held(self, cluster: Cluster, home: Path) -> None:
        engine = RayEngine("tiny", home / "models" / "tiny", ONE_THREAD)
        await engine.start()
        chunks = engine.generate(generation(240))
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]
        for _ in range(100):
            load = await engine.load()
            if load.running == load.kv_tokens_used == 0:
                break
            await asyncio.sleep(0.02)
        assert (load.running, load.kv_tokens_used) == (0, 0)
        assert load.generated_tokens < 240
        await engine.stop(0)

    async def test_a_killed_engine_ends_its_streams_and_comes_back(self, cluster: Cluster, home: Path) -> None:
        engine = RayEngine("tiny", home / "models" / "tiny", ONE_THREAD)
        await engine.start()
        before = await text_of(engine, generation())
        running = asyncio.ensure_future(text_of(engine, generation(250)))
        await asyncio.sleep(0.05)
        os.kill(await engine.pid(), signal.SIGKILL)
        with pytest.raises(Unavailable):
            await asyncio.wait_for(running, timeout=30)
        for _ in range(300):
            try:
                assert await text_of(engine, generation()) == before
                break
            except Unavailable:
                await asyncio.sleep(0.1)
        else:
            pytest.fail("the engine did not come back")
        await engine.stop(0)
