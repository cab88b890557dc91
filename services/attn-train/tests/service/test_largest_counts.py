"""No number in a submission makes its check slow, and a slow check keeps nobody from being answered."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from attn.v1 import training_pb2 as pb
from attn_core import Capability, installed
from attn_core.errors import AttnError, Unavailable
from attn_models.decoder.families import DecoderFamily
from attn_schema.decoder import DecoderConfig
from attn_schema.schema import fields_of, is_noun
from attn_schema.training import ModelConfig, TrainingConfig
from attn_train.admission import check_config
from attn_train.checking import Checks, require_wanted
from attn_train.least_memory import least_parameters
from attn_train.model import resolved, shapes_only

PROCESSOR_SECONDS = 20.0
"""More than a slow machine needs for the largest model that is accepted."""
INT32 = 2**31 - 1
WITH: Mapping[str, Mapping[str, Any]] = {
    "num_experts": {"num_experts_per_tok": 1},
    "num_experts_per_tok": {"num_experts": 4},
    "num_kv_heads": {"mechanism": "gqa"},
    "num_heads": {"head_dim": 2},
}
"""What a field needs beside it in order to be looked at at all."""
SMALL = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "max_seq_len": 8, "mechanism": "mha"}


def integers(noun: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The path of every field of a whole number in a noun, and its largest value."""
    for info in fields_of(noun):
        if is_noun(info.kind):
            yield from integers(info.kind, (*place, info.name))
        elif info.kind is int:
            yield (*place, info.name), int(info.bounds.get("le", INT32))


def in_options() -> Iterator[tuple[tuple[str, ...], int]]:
    """The counts of a decoder that are given as other options of the model."""
    for field in dataclasses.fields(DecoderConfig):
        if str(field.type).startswith("int") and field.name not in {*ModelConfig.__struct_fields__, "vocab_size"}:
            yield ("model", "model_options", field.name), INT32


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise in the main thread once the process has used this much processor time."""

    def late(*_: object) -> None:
        raise AssertionError(f"the check took more than {seconds} seconds")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    ("path", "largest"),
    [*integers(TrainingConfig), *in_options()],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_the_largest_value_of_every_count_is_checked_in_bounded_time(
    home: Path, path: tuple[str, ...], largest: int
) -> None:
    model: dict[str, Any] = SMALL | WITH.get(path[-1], {})
    values: dict[str, Any] = {"model": model, "data": {"dataset": str(home / "data" / "words.txt")}}
    if path[:2] == ("model", "model_options"):
        values["model"] |= {"num_experts": 4, "num_experts_per_tok": 1}
    inner = values
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    inner[path[-1]] = largest
    with within(PROCESSOR_SECONDS), contextlib.suppress(AttnError):
        check_config(TrainingConfig.from_mapping(values), home=home)


CAUSAL = [mechanism for mechanism in installed().mechanisms if mechanism.can(Capability.CAUSAL)]


@pytest.mark.parametrize("mechanism", CAUSAL, ids=lambda mechanism: mechanism.name)
def test_no_count_among_the_options_of_a_mechanism_takes_time_or_memory(home: Path, mechanism: Any) -> None:
    model = SMALL | {"mechanism": installed().mechanisms.name_of(mechanism)}
    counts = [field.name for field in dataclasses.fields(mechanism.Config) if str(field.type).startswith("int")]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name in {*counts} - {*ModelConfig.__struct_fields__}:
        values = {"model": model | {"options": {name: 2**22}}, "data": {"dataset": str(home / "data" / "words.txt")}}
        with within(PROCESSOR_SECONDS), contextlib.suppress(AttnError):
            check_config(resolved(TrainingConfig.from_mapping(values)), home=home)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "KiB"


@pytest.mark.parametrize(
    "options",
    [
        {"feed_forward": "swiglu", "tie_word_embeddings": False},
        {"positions": "none", "feed_forward": "none"},
        {"num_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 3, "moe_intermediate_size": 7, "num_layers": 4}
        | {"first_k_dense_replace": 1, "decoder_sparse_step": 2, "position_offset": 2},
    ],
)
def test_the_formula_counts_all_parameters_but_those_of_attention_and_norms(options: dict[str, Any]) -> None:
    made = DecoderFamily().configure(
        {"vocab_size": 11, "max_seq_len": 6, "hidden_size": 8, "num_layers": 3, "num_heads": 2} | options
    )
    with shapes_only():
        built = DecoderFamily().build(made)
    others = sum(p.numel() for name, p in built.named_parameters() if "attention" not in name and "norm" not in name)
    assert least_parameters(made) == others


@pytest.mark.parametrize(
    "given",
    [
        {"model": {"hidden_size": 2**16, "num_layers": 1024}},
        {"model": {"hidden_size": 2**12, "num_layers": 2, "num_experts": 2**14, "num_experts_per_tok": 1}},
        {"optimizer": {"batch_size": 2**20}, "model": {"max_seq_len": 2**20}},
        {"optimizer": {"gradient_accumulation_steps": 2**20, "batch_size": 2**20}},
    ],
)
def test_what_no_machine_can_hold_is_refused_before_it_is_built(home: Path, given: dict[str, Any]) -> None:
    values = {name: dict(part) for name, part in given.items()}
    values["model"] = SMALL | values.get("model", {})
    values["data"] = {"dataset": str(home / "data" / "words.txt")}
    began = time.process_time()
    with pytest.raises(AttnError) as caught:
        check_config(TrainingConfig.from_mapping(values), home=home)
    assert caught.value.reason == "OUT_OF_CAPACITY"
    assert time.process_time() - began < 0.5


async def test_a_slow_check_of_one_tenant_delays_no_other_and_ends_with_its_caller() -> None:
    checks, begun, ended = Checks(), threading.Semaphore(0), threading.Semaphore(0)

    def endless() -> None:
        begun.release()
        try:
            while True:
                require_wanted()
                time.sleep(0.001)
        finally:
            ended.release()

    async def check(tenant: str) -> None:
        async with checks.turn(tenant):
            await checks.run(endless)

    waiting = [asyncio.create_task(check("ann")) for _ in range(20)]
    await asyncio.to_thread(begun.acquire, timeout=60)
    async with asyncio.timeout(60), checks.turn("bob"):
        assert await checks.run(lambda: "checked") == "checked"
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert await asyncio.to_thread(ended.acquire, timeout=60)
    assert not begun.acquire(blocking=False), "a tenant's checks run one at a time"
    checks.close()


def test_a_build_ends_once_nobody_waits_for_it() -> None:
    """The real work: thousands of modules on the meta device."""

    async def leave() -> None:
        checks, result = Checks(), list[BaseException]()
        begun = threading.Event()

        def build() -> None:
            begun.set()
            try:
                with shapes_only():
                    DecoderFamily().build(
                        DecoderFamily().configure({"vocab_size": 9, "max_seq_len": 6, "num_layers": 1024} | wide)
                    )
            except Unavailable as error:
                result.append(error)
                raise

        wide = {"hidden_size": 8, "num_heads": 2, "num_experts": 32, "num_experts_per_tok": 1}
        task = asyncio.create_task(checks.run(build))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        await asyncio.wait([task])
        began = time.process_time()
        while not result:
            assert time.process_time() - began < PROCESSOR_SECONDS
            await asyncio.sleep(0.01)
        checks.close()

    asyncio.run(leave())


async def test_others_are_answered_while_a_caller_has_large_models_checked(shared: Any, by: Any, home: Path) -> None:
    def request(**sizes: int) -> pb.SubmitTrainingJobRequest:
        model = pb.ModelConfig(hidden_size=8, num_heads=2, max_seq_len=8, mechanism="mha", **sizes)
        data = pb.DataConfig(dataset=str(home / "data" / "words.txt"))
        return pb.SubmitTrainingJobRequest(config=pb.TrainingConfig(model=model, data=data), validate_only=True)

    async with shared() as stub:
        large = request(num_layers=1024, num_experts=32, num_experts_per_tok=1)
        calls = [stub.SubmitTrainingJob(large, **by("one")) for _ in range(8)]
        sent = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.2)
        await stub.SubmitTrainingJob(request(num_layers=1), timeout=30, **by("two"))
        await stub.ListTrainingJobs(pb.ListTrainingJobsRequest(), timeout=30, **by("one"))
        assert not all(task.done() for task in sent)
        for call in calls:
            call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await asyncio.gather(*sent)
