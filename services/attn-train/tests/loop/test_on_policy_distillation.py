"""Distillation on the student's own answers: the divergence is that of a loop, and what is sampled is learned."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.on_policy import OnPolicyConfig
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.model import configured
from attn_train.tasks.base import PADDED
from attn_train.tasks.distillation import DistilledDataset
from attn_train.tasks.instruction_tuning import chat_dataset
from attn_train.tasks.policy_losses import generalized_jsd
from small_tasks import DECODER

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 1.0])
def test_the_divergence_is_that_of_a_loop(beta):
    torch.manual_seed(1)
    student, teacher = torch.randn(2, 5, 7)
    expected = 0.0
    for ours, theirs in zip(student.double().softmax(-1).tolist(), teacher.double().softmax(-1).tolist(), strict=True):
        if beta in (0, 1):
            expected += (kl(ours, theirs) if beta else kl(theirs, ours)) / 5
            continue
        mixed = [beta * t + (1 - beta) * s for s, t in zip(ours, theirs, strict=True)]
        expected += (beta * kl(theirs, mixed) + (1 - beta) * kl(ours, mixed)) / 5
    assert generalized_jsd(student, teacher, beta).item() == pytest.approx(expected, rel=1e-5)


def small(tokenizer, seed):
    torch.manual_seed(seed)
    family, made = configured(DECODER.replace(max_seq_len=48), {"vocab_size": tokenizer.vocab_size})
    return family.build(made)


@pytest.fixture
def made(tmp_path):
    """Makes the task of conversations with a teacher."""
    tokenizer = Tokenizer(
        character_tokenizer("<>abcdefghijklmnopqrstuvwxyz. ").backend,
        TokenizerSettings(chat_template=TEMPLATE, eos_token="."),
    )
    turns = [["hi", "yes"], ["why", "because", "so", "it is"], ["and", "then what"], ["ok", "b"]]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": roles[n % 2], "content": said} for n, said in enumerate(turn)]} for turn in turns]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(lmbda, **on_policy):
        settings = OnPolicyConfig(**{"lmbda": lmbda, "max_completion_length": 9} | on_policy)
        config = TrainingConfig(
            model=ModelConfig(base_model="base", max_seq_len=48),
            data=DataConfig(dataset=str(path), format="chat", tokenizer="base", validation_fraction=0.0),
            objective={"teacher": "teacher"},
            optimizer=OptimizerConfig(batch_size=4),
            on_policy=settings,
        )
        data = chat_dataset(config.data, tokenizer, max_length=48)
        return tokenizer, DistilledDataset(data, small(tokenizer, 2)).task(config)

    return make


def test_the_answers_are_those_that_the_student_samples_behind_the_prompts(made):
    tokenizer, task = made(1.0, beta=0.3)
    student = small(tokenizer, 1)
    inputs, targets = task.sampled_batch(student, lambda: None)
    asked, total, count = set(), 0.0, 0
    for row, goals in zip(inputs, targets, strict=True):
        places = [place for place, goal in enumerate(goals.tolist()) if goal != PADDED]
        assert places == list(range(places[0], places[-1] + 1))
        assert len(places) <= 9
        asked.add(tokenizer.decode(row[: places[0] + 1].tolist(), skip_special=False))
        with torch.no_grad():
            ours, theirs = (
                model(row[None])[0, places].double().softmax(-1).tolist() for model in (student, task._teacher)
            )
        for p, q in zip(ours, theirs, strict=True):
            mixed = [0.3 * b + 0.7 * a for a, b in zip(p, q, strict=True)]
            total, count = total + 0.3 * kl(q, mixed) + 0.7 * kl(p, mixed), count + 1
    assert asked == {"<u>hi.<a>", "<u>why.<a>because.<u>so.<a>", "<u>and.<a>", "<u>ok.<a>"}
    assert task.loss(student, (inputs, targets)).item() == pytest.approx(total / count, rel=1e-4)
    assert task.take_metrics()["on_policy_share"] == 1


def test_a_share_of_the_batches_is_sampled_and_the_rest_are_the_datasets(made):
    tokenizer, task = made(0.5)
    student = small(tokenizer, 1)
    for _ in range(24):
        task.sampled_batch(student, lambda: None)
    assert 0.2 < task.take_metrics()["on_policy_share"] < 0.8
    _, plain = made(0.0)
    _, targets = plain.sampled_batch(student, lambda: None)
    texts = {tokenizer.decode(goals[goals != PADDED].tolist()) for goals in targets}
    assert any("because" in text for text in texts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"beta": 1.5}, "beta.*0 to 1 with lmbda"),
        ({"reward_funcs": ("accuracy",)}, "reward_funcs.*prompt"),
        ({"max_completion_length": 48}, "max_completion_length"),
        ({"max_completion_length": 47}, "at least one of at most 1 input tokens"),
    ],
)
def test_what_does_not_go_with_a_teacher_is_refused(made, change, said):
    with pytest.raises(InvalidValue, match=said):
        made(1.0, **change)
