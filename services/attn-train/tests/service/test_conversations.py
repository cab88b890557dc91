"""Jobs that learn from conversations, preferences and a teacher, over gRPC."""

from __future__ import annotations

import json
import math
from pathlib import Path

import grpc.aio
import pytest
import torch
from attn.v1 import training_pb2 as pb
from attn_models.decoder.decoder import Decoder
from attn_models.loading import save_model
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.decoder import DecoderConfig

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def save(
    folder: Path,
    alphabet: str = "<>abcdefghijklmnopqrstuvwxyz. ?!",
    template: str | None = TEMPLATE,
    dropout: float = 0.0,
) -> None:
    torch.manual_seed(0)
    tokenizer = Tokenizer(
        character_tokenizer(alphabet).backend, TokenizerSettings(chat_template=template, eos_token=".")
    )
    fields = {"max_seq_len": 32, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "mechanism": "mha"}
    dropped = {"dropout": dropout, "attention_dropout": dropout}
    config = DecoderConfig.from_plain(fields | dropped | {"vocab_size": tokenizer.vocab_size})
    save_model(folder, Decoder(config), tokenizer)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def config(home: Path) -> pb.TrainingConfig:
    """A base, and conversations in which a letter is answered with the same letter twice."""
    save(home / "models" / "base")
    save(home / "models" / "mute", template=None)
    save(home / "models" / "stranger", alphabet="<>abcdefghijklmnopqrstuvwxyz. ?#")
    letters = "abcdefghijklmnop"
    chats = [{"messages": [turn("user", one), turn("assistant", one * 2)]} for one in letters]
    pairs = [
        {"prompt": [turn("user", one)], "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}
        for one in letters
    ]
    for name, lines in (("chats", chats), ("pairs", pairs), ("bad", [*chats, {"messages": 3}])):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (home / "data" / f"{name}.jsonl").write_text(text)
    return pb.TrainingConfig(
        model=pb.ModelConfig(base_model="base"),
        data=pb.DataConfig(dataset=str(home / "data" / "chats.jsonl"), format="chat", validation_fraction=0.25),
        optimizer=pb.OptimizerConfig(steps=60, batch_size=8, learning_rate=3e-2),
        lora=pb.LoraConfig(lora_rank=4),
        evaluation=pb.EvaluationConfig(eval_steps=20, logging_steps=1),
        seed=3,
    )


def without_base(config: pb.TrainingConfig) -> None:
    config.model.ClearField("base_model")
    config.ClearField("lora")


async def trained(stub, config, submit, watch) -> tuple[pb.TrainingJob, list[float]]:
    await submit(stub, config, "tuned")
    events = [response.event for response in await watch(stub, "tuned")]
    job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="tuned"))).job
    assert job.state == pb.JOB_STATE_SUCCEEDED, job.error
    return job, [event.metrics.values["loss"] for event in events if "loss" in event.metrics.values]


@pytest.mark.parametrize("rank", [None, 4])
async def test_answers_are_learned_from_conversations(server, config, submit, watch, rank):
    # At 3e-2 an adapter of this base jumps about: whether it ends lower is then a matter of the chip's rounding.
    config.optimizer.learning_rate = 1e-2
    if rank is None:
        config.ClearField("lora")
    async with server() as stub:
        job, losses = await trained(stub, config, submit, watch)
    assert losses[-1] < losses[0] - 0.2
    assert job.last_metrics["validation_loss"] > 0
    assert (job.config.data.tokenizer, job.config.data.format) == ("base", "chat")


@pytest.mark.parametrize(("loss", "whole"), [("sigmoid", False), ("sigmoid", True), ("orpo", True)])
async def test_preferred_answers_become_likelier_than_rejected_ones(server, home, config, submit, watch, loss, whole):
    config.objective.preference_loss = loss
    if whole:
        config.ClearField("lora")
        config.optimizer.learning_rate = 3e-3
    save(home / "models" / "dropping", dropout=0.2)
    config.model.base_model = "dropping"
    config.data.dataset, config.data.format = str(home / "data" / "pairs.jsonl"), "preference"
    async with server() as stub:
        job, losses = await trained(stub, config, submit, watch)
    if loss == "sigmoid":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-5), "before the first update both are the same"
    assert losses[-1] < losses[0] - 0.1
    assert job.last_metrics["reward_accuracy"] == 1.0


async def test_a_teacher_is_learned_beside_the_text(server, config, submit, watch):
    config.objective.teacher, config.objective.distillation_weight = "base", 1.0
    async with server() as stub:
        _, losses = await trained(stub, config, submit, watch)
    assert losses[0] == pytest.approx(0.0, abs=1e-5), "the base is its own teacher"
    assert max(losses) < 0.01


def rewarded(home: Path, config: pb.TrainingConfig, pattern: str = "[a-z]+") -> None:
    """Let the base learn to say only letters, and to stop."""
    rows = [{"prompt": [turn("user", one)], "pattern": pattern} for one in "abcdefgh"]
    (home / "data" / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.dataset, config.data.format = str(home / "data" / "prompts.jsonl"), "prompt"
    config.on_policy.CopyFrom(pb.OnPolicyConfig(reward_funcs=["regex"], num_generations=8, max_completion_length=5))
    config.optimizer.batch_size, config.optimizer.steps, config.optimizer.learning_rate = 32, 40, 5e-3
    config.checkpoint.save_steps = 1


@pytest.mark.parametrize("rank", [None, 4])
async def test_what_is_rewarded_is_said_more_often(server, home, config, submit, watch, rank):
    rewarded(home, config)
    config.on_policy.beta = 0.01
    if rank is None:
        config.ClearField("lora")
    async with server() as stub:
        if rank is None:
            priced = await stub.EstimateTrainingJob(pb.EstimateTrainingJobRequest(config=config))
            assert priced.estimate.tokens_per_step == 32 * 5
        await submit(stub, config, "tuned")
        events = [response.event for response in await watch(stub, "tuned")]
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="tuned"))).job
    assert job.state == pb.JOB_STATE_SUCCEEDED, job.error
    values = [event.metrics.values for event in events if "reward" in event.metrics.values]
    assert values[0]["kl"] == pytest.approx(0.0, abs=1e-9), "the reference is the base"
    assert values[0]["sampling_logp_difference"] < 1e-6
    first, last = (sum(each["reward"] for each in part) / 5 for part in (values[:5], values[-5:]))
    assert last > first + (0.2 if rank is None else 0.05)
    assert job.last_metrics["validation_reward"] > 0
    assert values[-1]["kl"] > 0


async def test_a_reward_that_raises_fails_the_job_at_its_last_checkpoint(server, home, config, submit, watch):
    rewarded(home, config)
    with (home / "data" / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x", "pattern": "("}) + "\n")
    config.data.validation_fraction = 0.0
    async with server() as stub:
        await submit(stub, config, "torn")
        await watch(stub, "torn")
        job = (await stub.GetTrainingJob(pb.GetTrainingJobRequest(id="torn"))).job
    assert (job.state, job.error.reason) == (pb.JOB_STATE_FAILED, "REWARD_FAILED")
    assert "prompts.jsonl" in job.error.message
    assert job.latest_checkpoint.step == job.step


async def test_a_teacher_is_learned_on_what_the_student_samples(server, config, submit, watch):
    config.objective.teacher = "base"
    config.on_policy.CopyFrom(pb.OnPolicyConfig(lmbda=1.0, max_completion_length=5))
    config.optimizer.steps = 5
    async with server() as stub:
        job, losses = await trained(stub, config, submit, watch)
    assert losses[0] == pytest.approx(0.0, abs=1e-6), "the base is its own teacher"
    assert job.last_metrics["on_policy_share"] == 1


def unrewarded(config: pb.TrainingConfig, **changes: object) -> None:
    config.data.format = "prompt"
    settings = {"reward_funcs": ["regex"], "max_completion_length": 5, "num_generations": 8} | changes
    config.on_policy.CopyFrom(pb.OnPolicyConfig(**settings))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: unrewarded(config), "without pattern, prompt"),
        (lambda config: unrewarded(config, reward_funcs=["regexp"]), "regex"),
        (lambda config: unrewarded(config, num_generations=1), "num_generations"),
        (lambda config: unrewarded(config, max_completion_length=40), "max_completion_length"),
        (without_base, "without a base model"),
        (lambda config: setattr(config.data, "format", "chats"), "format"),
        (lambda config: setattr(config.data, "dataset", "shakespeare"), "the path of a file"),
        (lambda config: setattr(config.data, "format", "preference"), "columns: 'messages'.*chosen.*rejected"),
        (lambda config: setattr(config.data, "dataset", config.data.dataset.replace("chats", "bad")), "line 17"),
        (lambda config: setattr(config.model, "base_model", "mute"), "no chat template.*tokenizer"),
        (lambda config: Path(config.data.dataset).write_text("\n"), "with none.*at least one row"),
        (
            lambda config: Path(config.data.dataset).write_text(json.dumps({"messages": [turn("user", "a")]})),
            "line 1.*role assistant",
        ),
        (
            lambda config: setattr(config.objective, "teacher", "stranger"),
            "vocabulary of teacher stranger differs from that of the model",
        ),
        (lambda config: setattr(config.objective, "teacher", "nobody"), "nobody"),
        (lambda config: setattr(config.objective, "preference_beta", 0.1), "none unless format is preference"),
        (lambda config: setattr(config.objective, "distillation_weight", 0.1), "without a teacher"),
    ],
)
async def test_what_does_not_fit_is_refused_before_a_job_is_recorded(server, config, submit, change, said):
    change(config)
    async with server() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await submit(stub, config, "bad")
        assert refused.value.code() is not grpc.StatusCode.INTERNAL
        assert "\n" not in refused.value.details()
        assert not (await stub.ListTrainingJobs(pb.ListTrainingJobsRequest())).jobs
