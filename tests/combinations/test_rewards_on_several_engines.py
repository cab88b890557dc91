"""GRPO whose completions a running server samples, by one engine or replicas on Ray, is the run of one process: the
same completions, rewards and losses, for one trainer and for two, stopped and resumed, and when a replica is killed."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from attn_client import AsyncClient, ClientSettings
from attn_gateway import Cluster, ClusterSettings, GatewaySettings, serving
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import DeploymentConfig, EngineConfig
from attn_schema.decoder import DecoderConfig
from attn_schema.training import JobEvent, JobState, TrainingConfig
from attn_serve.service import InferenceGrpc
from attn_train.service import TrainingGrpc
from attn_train.settings import TrainSettings

STEPS = 6
ENGINE = "ServeReplica"
"""How Ray calls the processes of replicas."""
SAME = ("reward", "reward_std", "completion_length", "truncated_share", "validation_reward")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    fields = {
        "max_seq_len": 24,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "mechanism": "gqa",
        "num_kv_heads": 2,
    }
    tokenizer = character_tokenizer("abcdefgh ")
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **fields))
    save_model(tmp_path / "models" / "small", model, tokenizer, layout=None)
    rows = [{"prompt": text, "pattern": "[a-d].*"} for text in ("abc", "de", "fgh a", "a b", "cab", "h", "gg", "fade")]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def config(home: Path, **others: Any) -> TrainingConfig:
    on_policy = {"reward_funcs": ["regex"], "max_completion_length": 5, "batch_invariant": True, "num_generations": 4}
    return TrainingConfig.from_mapping(
        {
            "model": {"base_model": "small"},
            "data": {"dataset": str(home / "data" / "rows.jsonl"), "format": "prompt", "validation_fraction": 0.25},
            "optimizer": {"steps": STEPS, "batch_size": 16, "learning_rate": 3e-3},
            "evaluation": {"logging_steps": 1, "eval_steps": 3},
            "checkpoint": {"save_steps": 2},
            "on_policy": on_policy | others.pop("on_policy", {}),
            "seed": 3,
            **others,
        }
    )


@contextlib.asynccontextmanager
async def server(home: Path, *, ray: bool, replicas: int | None = None) -> AsyncIterator[tuple[AsyncClient, str]]:
    cluster = Cluster(ClusterSettings(home=home, cpus=2, ray=ray))
    services = [InferenceGrpc(cluster), TrainingGrpc(cluster, TrainSettings(threads=1))]
    async with (
        serving(services, GatewaySettings(port=0)) as running,
        AsyncClient(ClientSettings(address=running.address)) as client,
    ):
        settings, deployment = EngineConfig(batch_invariant=True), DeploymentConfig(replicas=replicas)
        await client.models.load("policy", source="small", engine=settings, deployment=deployment)
        yield client, running.address


async def trained(client: AsyncClient, name: str, config: TrainingConfig) -> dict[int, dict[str, float]]:
    """The metrics of a job by step."""
    await client.jobs.submit(config, job_id=name)
    return await measured(client, name)


async def measured(client: AsyncClient, name: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    async for event in client.jobs.watch(name):
        if isinstance(event, JobEvent) and event.metrics is not None:
            found[event.metrics.step] = dict(event.metrics.values)
    job = await client.jobs.get(name)
    assert job.state is JobState.SUCCEEDED, job.error
    return found


def require_same(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]], tolerance: float) -> None:
    assert sorted(found) == sorted(wanted) == list(range(1, STEPS + 1))
    for step, values in wanted.items():
        assert {name: found[step].get(name) for name in SAME} == {name: values.get(name) for name in SAME}, step
        for name in ("loss", "gradient_norm"):
            assert found[step][name] == pytest.approx(values[name], abs=tolerance), (step, name)
        assert found[step].get("sampling_logp_difference", 0.0) <= tolerance
    rewards = {values["reward"] for values in wanted.values()}
    assert len(rewards) > 2, "the policy changes what it says"


async def test_a_server_samples_as_one_process_does_also_for_two_trainers_and_after_a_stop(home: Path) -> None:
    async with server(home, ray=False) as (client, address):
        wanted = await trained(client, "one", config(home))
        far = {"rollout_server": address, "rollout_model": "policy"}
        require_same(await trained(client, "served", config(home, on_policy=far)), wanted, 0.0)
        require_same(await trained(client, "shared", config(home, workers=2)), wanted, 1e-5)
        both = config(home, workers=2, on_policy=far)
        await client.jobs.submit(both, job_id="stopped")
        before: dict[int, dict[str, float]] = {}
        async for event in client.jobs.watch("stopped"):
            if isinstance(event, JobEvent) and event.metrics is not None:
                before[event.metrics.step] = dict(event.metrics.values)
                await client.jobs.cancel("stopped")
        assert (await client.jobs.get("stopped")).state is JobState.CANCELLED
        await client.jobs.resume("stopped")
        require_same(before | await measured(client, "stopped"), wanted, 1e-5)


async def test_a_server_samples_for_an_adapter_at_a_temperature_as_one_process_does(home: Path) -> None:
    hot, lora = {"temperature": 0.7}, {"lora_rank": 2, "use_dora": True}
    async with server(home, ray=False) as (client, address):
        wanted = await trained(client, "one", config(home, on_policy=hot, lora=lora))
        far = {"rollout_server": address, "rollout_model": "policy"} | hot
        found = await trained(client, "served", config(home, on_policy=far, lora=lora))
        for step, values in found.items():
            # What the server says is that of merged weights.
            assert values.pop("sampling_logp_difference") <= 1e-6, step
        require_same(found, wanted, 0.0)


@pytest.mark.ray
@pytest.mark.cluster
async def test_two_engines_and_two_trainers_on_ray_go_on_when_a_replica_is_killed(home: Path) -> None:
    async with server(home, ray=True, replicas=2) as (client, address):
        wanted = await trained(client, "one", config(home))
        far = {"rollout_server": address, "rollout_model": "policy"}
        await client.jobs.submit(config(home, workers=2, on_policy=far), job_id="two")
        killed = 0
        async for event in client.jobs.watch("two"):
            if isinstance(event, JobEvent) and event.metrics is not None and event.metrics.step == 2:
                replicas = [found for found in psutil.Process().children(recursive=True) if ENGINE in found.name()]
                killed = len(replicas)
                replicas[0].send_signal(signal.SIGKILL)
        require_same(await measured(client, "two"), wanted, 1e-5)
        assert killed == 2
