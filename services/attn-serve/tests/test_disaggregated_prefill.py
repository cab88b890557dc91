"""Prompts computed by one replica and completed by another: the tokens of one engine, also where one of them dies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from asking_inference import until
from attn_core.errors import Incompatible, InvalidValue
from attn_engine.client import TextTask
from attn_engine.in_process import InProcess
from attn_schema import DeploymentConfig, EngineConfig, Prompt, SamplingParams, ScoringParams, StructuredOutput
from attn_serve import replica_messages as messages
from attn_serve import state_transfer
from attn_serve.disaggregation import DisaggregatedReplicas, require_movable
from attn_serve.engine_server import EngineServer
from attn_serve.state_transfer import ByteBudget, HeldStates, StateLost, fetch
from local_replicas import LocalReplicas, signed
from low_rank import make_adapter
from mixed_requests import mixed_tasks, outcome

ONE_THREAD = EngineConfig(num_threads=1)
LONG = "to be or not to be that is the question "
"""A prompt that is worth moving; the tokenizer's tokens are characters."""


def task(name: str = "", prompt: str = LONG, tokens: int = 30, **changes: object) -> TextTask:
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    made = TextTask(prompt=Prompt(text=prompt), params=params, **changes)
    return replace(made, id=name) if name else made


def shorter(tasks: dict[str, TextTask]) -> dict[str, TextTask]:
    """The same kinds of requests for fewer tokens."""
    found = {}
    for name, one in tasks.items():
        params = one.params
        if isinstance(params, SamplingParams):
            params = params.replace(max_new_tokens=24)
            if params.structured_output is not None:
                params = params.replace(structured_output=StructuredOutput(regex="[a-z ]{20}[.]"))
        found[name] = replace(one, params=params)
    return found


async def said_alone(folder: Path, tasks: dict[str, TextTask], config: EngineConfig = ONE_THREAD) -> dict:
    """What one engine returns."""
    alone = InProcess(folder, config)
    await alone.start()
    found = {name: (await outcome(alone, one)).said for name, one in tasks.items()}
    await alone.stop(0)
    return found


@pytest.fixture
async def replicas(home: Path) -> AsyncIterator[LocalReplicas]:
    async with LocalReplicas(home / "models" / "tiny", ONE_THREAD) as made:
        yield made


KINDS = {
    "paged keys and values": ("mha", {}),
    "quantised keys and values": ("gqa", {"kv_cache": "int8"}),
    "coded blocks": ("mha", {"kv_cache": "kivi4"}),
    "latents": ("mla", {}),
    "a window": ("sliding_window", {}),
    "sums of fixed size": ("linear", {}),
    "a recurrent state and keys and values": ("gla mha", {}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_request_gets_the_tokens_of_one_engine(kind: str, saved_tiny: Callable[..., Path]) -> None:
    mechanisms, config = KINDS[kind]
    folder = saved_tiny(*mechanisms.split())
    engine = ONE_THREAD.replace(**config)
    tasks = shorter(mixed_tasks(LONG))
    wanted = await said_alone(folder, tasks, engine)
    async with LocalReplicas(folder, engine) as replicas:
        found = dict(
            zip(tasks, await asyncio.gather(*(outcome(replicas.engine, one) for one in tasks.values())), strict=True)
        )
        assert [name for name in tasks if found[name].said != wanted[name]] == []
        moved = sum(not isinstance(one.params, ScoringParams) for one in tasks.values())
        assert replicas.engine.outcomes == {"moved": moved}
        assert replicas.imported() == moved * (len(LONG) - 1)
        await until(replicas.nothing_left)


async def test_short_prompts_and_scores_are_computed_where_they_are_decoded(replicas: LocalReplicas) -> None:
    scored = replace(task(), params=ScoringParams())
    for one in (task(prompt="To be"), scored):
        await outcome(replicas.engine, one)
    assert not replicas.engine.outcomes
    assert replicas.prefill.servers[0].engine.host.stats().computed_tokens == 0


async def test_beginnings_are_found_by_prefill_replicas_and_counted(replicas: LocalReplicas) -> None:
    usages = []
    for ending in ("sleep", "dream"):
        found = [delta async for delta in replicas.engine.generate(task(prompt=LONG + ending))]
        usages.append(found[-1].usage)
    prefilled = replicas.prefill.servers[0].engine.host.stats()
    assert usages[0].cached_tokens == 0
    assert prefilled.cached_tokens == usages[1].cached_tokens >= len(LONG) // 16 * 16
    assert replicas.imported() == 2 * (len(LONG) + 4)
    stats = await replicas.engine.stats()
    assert {one.name.split()[0] for one in stats.replicas} == {"prefill", "decode"}


async def test_an_adapter_moves_with_its_prompts(replicas: LocalReplicas, home: Path) -> None:
    make_adapter(home / "models" / "tiny", "moved", 3)
    wanted = await said_alone(home / "models" / "moved-merged", {"greedy": task()})
    await replicas.engine.load_adapter("moved", home / "models" / "moved")
    assert (await outcome(replicas.engine, replace(task(), adapter="moved"))).said == wanted["greedy"]
    assert replicas.imported() == len(LONG) - 1
    await replicas.engine.unload_adapter("moved")


def hold_before(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> tuple[asyncio.Event, asyncio.Event]:
    """Events: the server has been asked for `method`, and it may go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    unheld: Callable[..., Awaitable[object]] = getattr(server, method)

    async def held(*arguments: object) -> object:
        reached.set()
        await go_on.wait()
        return await unheld(*arguments)

    monkeypatch.setattr(server, method, held)
    return reached, go_on


@pytest.mark.parametrize("method", ["_prefill", "_submit_moved"])
@pytest.mark.parametrize("spare", [False, True])
async def test_a_prefill_replica_that_dies_before_or_at_the_hand_over_costs_no_token(
    home: Path, monkeypatch: pytest.MonkeyPatch, method: str, spare: bool
) -> None:
    folder = home / "models" / "tiny"
    wanted = await said_alone(folder, {"greedy": task()})
    async with LocalReplicas(folder, ONE_THREAD) as replicas:
        killed = replicas.prefill.servers[0]
        reached, go_on = hold_before(
            killed if method == "_prefill" else replicas.decode.servers[0], monkeypatch, method
        )
        running = asyncio.create_task(outcome(replicas.engine, task()))
        await reached.wait()
        if spare:
            await replicas.prefill.add()
            await until(lambda: replicas.prefill.replicas == 2)
        await replicas.prefill.kill(killed)
        await until(lambda: killed.address.id not in replicas.prefill.stats_by_replica())
        go_on.set()
        assert (await running).said == wanted["greedy"]
        assert replicas.engine.outcomes["moved"] == spare
        assert replicas.imported() == spare * (len(LONG) - 1)
        await until(replicas.nothing_left)


def hold_after(server: EngineServer, monkeypatch: pytest.MonkeyPatch, tokens: int) -> threading.Event:
    """Lets the engine of a server take no step after so many tokens before the event is set."""
    engine, go_on = server.engine.host._loop._engine, threading.Event()
    step = engine.step

    def held() -> list:
        if engine.stats().generated_tokens >= tokens:
            go_on.wait(60)
        return step()

    monkeypatch.setattr(engine, "step", held)
    return go_on


async def test_a_decode_replica_that_dies_loses_no_stream_and_the_prompt_moves_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = home / "models" / "tiny"
    tasks = {name: one for name, one in mixed_tasks(LONG).items() if name not in ("scores", "beams")}
    wanted = await said_alone(folder, tasks)
    async with LocalReplicas(folder, ONE_THREAD, decode=2) as replicas:
        held = [hold_after(server, monkeypatch, 10) for server in replicas.decode.servers]
        begun = asyncio.Semaphore(0)
        running = [asyncio.create_task(outcome(replicas.engine, one, begun)) for one in tasks.values()]
        await begun.acquire()
        killed = max(replicas.decode.servers, key=lambda server: server.engine.host.stats().running)
        killing = asyncio.create_task(replicas.decode.kill(killed))
        await until(lambda: killed.address.id not in replicas.decode.stats_by_replica())
        for each in held:
            each.set()
        await killing
        found = dict(zip(tasks, await asyncio.gather(*running), strict=True))
        assert [name for name in tasks if found[name].said != wanted[name]] == []
        resumed = sum(one.resumptions > 0 for one in found.values())
        assert resumed >= 1
        assert replicas.engine.outcomes["moved"] == len(tasks) + resumed
        await until(replicas.nothing_left)


@pytest.mark.parametrize("method", ["_prefill", "_submit_moved"])
async def test_a_request_that_is_cancelled_on_its_way_leaves_nothing_anywhere(
    replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    group = replicas.prefill if method == "_prefill" else replicas.decode
    reached, go_on = hold_before(group.servers[0], monkeypatch, method)
    running = asyncio.create_task(outcome(replicas.engine, task()))
    await reached.wait()
    held = replicas.prefill.servers[0].states.budget.held
    assert (held > 0) == (method == "_submit_moved")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    go_on.set()
    await until(replicas.nothing_left)
    assert (await outcome(replicas.engine, task())).ids
    await until(replicas.nothing_left)


async def test_a_gateway_that_is_gone_leaves_no_state(replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, _ = hold_before(replicas.decode.servers[0], monkeypatch, "_submit_moved")
    running = asyncio.create_task(outcome(replicas.engine, task()))
    await reached.wait()
    assert len(replicas.prefill.servers[0].states) == 1
    for group in (replicas.prefill, replicas.decode):
        for client in group._replicas.values():
            await client.close()
    await until(lambda: not replicas.prefill.servers[0].states)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_states_of_other_weights_are_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "HOLD_SECONDS", 1.0)
    folder = home / "models" / "tiny"
    replicas = LocalReplicas(folder, ONE_THREAD)
    replicas.prefill.model = "another"
    async with replicas:
        assert (await outcome(replicas.engine, task())).said == (await said_alone(folder, {"": task()}))[""]
        assert replicas.imported() == 0
        await until(replicas.nothing_left)


async def test_a_state_is_fetched_once_and_only_with_its_key(replicas: LocalReplicas) -> None:
    client = next(iter(replicas.prefill._replicas.values()))
    ticket = await client.call("prefill", task("held"))
    with pytest.raises(StateLost):
        await fetch(msgspec.structs.replace(ticket, key="guessed"), None)
    state = await fetch(ticket, None)
    assert (len(state.exported), state.tokens) == (ticket.size, len(LONG) - 1)
    with pytest.raises(StateLost):
        await fetch(ticket, None)
    await until(replicas.nothing_left)


async def test_a_state_of_another_size_than_was_told_is_refused(replicas: LocalReplicas) -> None:
    client = next(iter(replicas.prefill._replicas.values()))
    for more in (-1, 1):
        ticket = await client.call("prefill", task())
        with pytest.raises(StateLost, match="bytes"):
            await fetch(msgspec.structs.replace(ticket, size=ticket.size + more), None)


async def test_states_that_nobody_fetches_are_dropped(replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "HOLD_SECONDS", 0.05)
    client = next(iter(replicas.prefill._replicas.values()))
    await client.call("prefill", task())
    await until(replicas.nothing_left)


async def test_a_full_replica_waits_and_the_bytes_held_stay_within_the_bound(
    replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as 12 prompts at once through room for three states at either end."""
    (server,), (decode,) = replicas.prefill.servers, replicas.decode.servers
    client = next(iter(replicas.prefill._replicas.values()))
    size = (await client.call("prefill", task("measured"))).size
    await client.cancel("measured")
    server.states, decode.fetched = HeldStates(3 * size), ByteBudget(3 * size)
    most = 0
    unwatched = ByteBudget.hold

    def hold(budget: ByteBudget, name: str, more: int) -> None:
        nonlocal most
        unwatched(budget, name, more)
        most = max(most, budget.held)

    monkeypatch.setattr(ByteBudget, "hold", hold)
    prompts = [chr(97 + place) + LONG[1:] for place in range(12)]
    found = await asyncio.gather(*(outcome(replicas.engine, task(prompt=prompt)) for prompt in prompts))
    assert all(len(one.ids[0]) == 30 for one in found)
    assert size <= most <= 3 * size
    assert replicas.engine.outcomes["moved"] >= 3
    await until(replicas.nothing_left)


async def test_one_state_that_is_larger_than_the_bound_moves_alone(replicas: LocalReplicas) -> None:
    replicas.prefill.servers[0].states, replicas.decode.servers[0].fetched = HeldStates(10), ByteBudget(10)
    await outcome(replicas.engine, task())
    assert replicas.engine.outcomes == {"moved": 1}


async def test_a_draining_prefill_replica_hands_over_what_it_computed(
    replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = hold_before(replicas.decode.servers[0], monkeypatch, "_submit_moved")
    running = asyncio.create_task(outcome(replicas.engine, task()))
    await reached.wait()
    draining = asyncio.create_task(replicas.prefill.servers[0].drain(30))
    await until(lambda: replicas.prefill.replicas == 0)
    go_on.set()
    await running
    assert replicas.imported() == len(LONG) - 1
    await draining
    await outcome(replicas.engine, task())
    assert replicas.engine.outcomes == {"moved": 1, "no prefill replica runs": 1}


async def test_a_silent_prefill_replica_is_not_waited_for(
    replicas: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not come, although the connection is open."""
    monkeypatch.setattr(state_transfer, "READ_SECONDS", 0.2)
    end = asyncio.Event()
    silent = await asyncio.start_server(lambda *_: end.wait(), "127.0.0.1", 0)
    ticket = await next(iter(replicas.prefill._replicas.values())).call("prefill", task())
    target = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    with pytest.raises(StateLost):
        await fetch(msgspec.structs.replace(ticket, target=target), None)
    end.set()
    silent.close()


async def test_states_move_over_tls_where_replicas_have_it(home: Path, tmp_path: Path) -> None:
    async with LocalReplicas(
        home / "models" / "tiny", ONE_THREAD, signed(tmp_path / "ours", messages.TLS_NAME)
    ) as replicas:
        await outcome(replicas.engine, task())
        assert replicas.engine.outcomes == {"moved": 1}
        assert replicas.imported() == len(LONG) - 1


def test_models_and_caches_whose_states_cannot_move_are_refused_by_name(home: Path, tmp_path: Path) -> None:
    deployment = DeploymentConfig(replicas=1, prefill_replicas=1)
    models = home / "models"
    with pytest.raises(Incompatible, match=r"tiny-bert is an encoder"):
        DisaggregatedReplicas.of("a", models / "tiny-bert", ONE_THREAD, deployment)
    (tmp_path / "config.json").write_text('{"model_type": "t5", "is_encoder_decoder": true}')
    with pytest.raises(Incompatible, match="encoder-decoder"):
        require_movable(tmp_path, ONE_THREAD)
    require_movable(models / "tiny", ONE_THREAD)


@pytest.mark.parametrize("given", [{"prefill_replicas": 0, "replicas": 1}, {"prefill_replicas": 1}])
def test_prefill_replicas_without_those_that_decode_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="prefill_replicas"):
        DeploymentConfig(**given)
