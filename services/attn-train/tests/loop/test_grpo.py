"""GRPO on a small decoder: the loss is that of a loop over float64 numbers, the sampling policy is the trained one, a
resumed run is the same run, and what a reward does wrong is named."""

from __future__ import annotations

import json
import math
import statistics
import sys
import types

import pytest
import torch
from attn_core import installed
from attn_core.errors import InvalidValue
from attn_core.plugins.hooks import Reward
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.finetuning import LoraConfig
from attn_schema.on_policy import OnPolicyConfig
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train import rewards
from attn_train.base_model import LORA
from attn_train.checkpoint import CheckpointFolder
from attn_train.doing import now, telling
from attn_train.model import configured
from attn_train.precision import forward_precision
from attn_train.records import NullReporter, Stop, StopFlag
from attn_train.rewards import RewardFailed, Scored
from attn_train.tasks.base import PADDED
from attn_train.tasks.grpo import prompt_dataset
from attn_train.tasks.on_policy import Tempered
from attn_train.tasks.policy_losses import grpo_loss
from attn_train.trainer import Trainer
from small_tasks import DECODER

BETA, TEMPERATURE, LONGEST = 0.3, 0.7, 6


def vowels(completions, prompts, weight=None):
    del prompts, weight
    return [sum(text.count(vowel) for vowel in "aeiou") / LONGEST for text in completions]


@pytest.fixture
def tokenizer():
    return Tokenizer(character_tokenizer("abcdefghij. ").backend, TokenizerSettings(eos_token="."))


@pytest.fixture
def reward(monkeypatch):
    """Makes `function` the installed reward "mine"."""

    def offer(function):
        registry = types.SimpleNamespace(get=lambda name: Reward(name=name, summary="", target="my_rewards:function"))
        monkeypatch.setattr(rewards, "installed", lambda: types.SimpleNamespace(rewards=registry))
        monkeypatch.setitem(sys.modules, "my_rewards", types.SimpleNamespace(function=function))

    offer(vowels)
    return offer


def config(tmp_path, *, optimizer=None, rows=None, **on_policy):
    path = tmp_path / "prompts.jsonl"
    rows = rows or [{"prompt": text} for text in ("abc", "de", "fghi", "a b", "cab", "j")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"num_generations": 4, "max_completion_length": LONGEST, "reward_funcs": ("mine",)} | on_policy
    return TrainingConfig(
        model=ModelConfig(base_model="base", max_seq_len=24),
        data=DataConfig(dataset=str(path), format="prompt", tokenizer="base", validation_fraction=0.0),
        lora=LoraConfig(lora_rank=2),
        optimizer=OptimizerConfig(**({"steps": 6, "batch_size": 8, "learning_rate": 1e-2} | (optimizer or {}))),
        checkpoint=CheckpointConfig(save_steps=1),
        evaluation=EvaluationConfig(logging_steps=1, eval_steps=100),
        on_policy=OnPolicyConfig(**settings),
        seed=5,
    )


def adapted(tokenizer, dtype=torch.float32):
    """A decoder whose adapter already differs from the base."""
    torch.manual_seed(3)
    family, made = configured(DECODER, {"vocab_size": tokenizer.vocab_size})
    model = family.build(made).to(dtype).requires_grad_(requires_grad=False)
    adapter = LoraAdapter.fresh(model, AdapterConfig(r=2, lora_alpha=4.0), modules={}).to(dtype)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.3)
    model.adapted = AdaptedModel(model)
    model.adapted.always(adapter)
    model.add_module(LORA, adapter)
    return model


def log_probabilities(model, ids, start, reference=False):
    """Those of the tokens from `start` on, one by one, at the temperature."""
    with torch.no_grad():
        if reference:
            with model.adapted.without():
                logits = model(torch.tensor([ids]))[0].tolist()
        else:
            logits = model(torch.tensor([ids]))[0].tolist()
    found = []
    for place in range(start, len(ids)):
        row = [value / TEMPERATURE for value in logits[place - 1]]
        found.append(row[ids[place]] - math.log(sum(map(math.exp, row))))
    return found


def rows_in(batch):
    """The prompt's length and the tokens of each row of a batch."""
    for inputs, targets in zip(batch[0].tolist(), batch[-1].tolist(), strict=True):
        learned = [place for place, target in enumerate(targets) if target != PADDED]
        yield learned[0] + 1, [*inputs[: learned[-1] + 1], targets[learned[-1]]]


def averaged(losses, kind):
    """The mean of the tokens' losses of each completion."""
    if kind == "grpo":
        return sum(sum(row) / len(row) for row in losses) / len(losses)
    if kind == "dr_grpo":
        return sum(map(sum, losses)) / (len(losses) * LONGEST)
    return sum(map(sum, losses)) / sum(map(len, losses))


@pytest.mark.parametrize(
    ("kind", "level", "scale", "unbiased"),
    [
        ("grpo", "token", "group", True),
        ("bnpo", "token", "batch", False),
        ("dr_grpo", "token", "none", True),
        ("dapo", "token", "group", False),
        ("grpo", "sequence", "group", True),
    ],
)
def test_the_loss_is_that_of_a_loop_over_the_completions(tmp_path, tokenizer, reward, kind, level, scale, unbiased):
    settings = config(
        tmp_path,
        loss_type=kind,
        importance_sampling_level=level,
        scale_rewards=scale,
        beta=BETA,
        temperature=TEMPERATURE,
        epsilon_low=0.1,
        epsilon_high=0.2,
        use_bias_correction_kl=unbiased,
    )
    task, model = prompt_dataset(settings, tokenizer).task(settings), adapted(tokenizer, torch.float64)
    inputs, old, reference, advantages, targets = task.sampled_batch(model, lambda: None)
    torch.manual_seed(0)
    moved = 0.3 * torch.randn(old.shape, dtype=torch.float64) + 0.3 * torch.randn(len(old), 1, dtype=torch.float64)
    old = old.double() + moved  # of a policy some steps ago
    scores, losses, clips = [], [], 0
    for start, ids in rows_in((inputs, targets)):
        text = tokenizer.decode(ids[start:])
        scores.append(sum(text.count(vowel) for vowel in "aeiou") / LONGEST)
    for row, (start, ids) in enumerate(rows_in((inputs, targets))):
        group = scores[row // 4 * 4 :][:4]
        gain = scores[row] - statistics.mean(group)
        if scale != "none":
            gain /= statistics.stdev(group if scale == "group" else scores) + 1e-4
        now, base = (log_probabilities(model, ids, start, reference=which) for which in (False, True))
        before = old[row, start - 1 : len(ids) - 1].tolist()
        logs = [n - b for n, b in zip(now, before, strict=True)]
        if level == "sequence":
            logs = [statistics.mean(logs)] * len(logs)
        losses.append([])
        for log, n, b in zip(logs, now, base, strict=True):
            ratio = math.exp(log)
            chosen = min(ratio * gain, max(0.9, min(ratio, 1.2)) * gain)
            clips += chosen < ratio * gain
            divergence = (math.exp(b - n) - (b - n) - 1) * (ratio if unbiased else 1)
            losses[-1].append(-chosen + BETA * divergence)
    assert clips > 0, "some ratios are clipped"
    batch = inputs, old, reference.double(), advantages.double(), targets
    found = task.loss(model, batch)
    assert found.item() == pytest.approx(averaged(losses, kind), rel=2e-5)  # rewards and reference are float32
    found.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in getattr(model, LORA).parameters())


def test_the_policy_that_samples_is_the_one_that_is_trained(tmp_path, tokenizer, reward):
    settings = config(tmp_path, temperature=TEMPERATURE, loss_type="grpo")
    task, model = prompt_dataset(settings, tokenizer).task(settings), adapted(tokenizer)
    inputs, old, advantages, targets = task.sampled_batch(model, lambda: None)
    apart = 0.0
    for row, (start, ids) in enumerate(rows_in((inputs, targets))):
        now = log_probabilities(model, ids, start)
        apart = max(apart, *(abs(a - b) for a, b in zip(now, old[row, start - 1 :].tolist(), strict=False)))
    assert apart < 2e-6
    found = task.loss(model, (inputs, old, advantages, targets))
    assert abs(found.item()) < 1e-5, "all ratios are 1, and the advantages of a prompt add up to 0"
    assert task.take_metrics()["sampling_logp_difference"] < 1e-6
    assert all(len(set(map(tuple, group))) > 1 for group in inputs.view(2, 4, -1).tolist()), "completions differ"


def test_batch_invariant_sampling_and_training_differ_in_no_bit(tmp_path, tokenizer, reward):
    settings = config(tmp_path, temperature=TEMPERATURE, loss_type="grpo", batch_invariant=True)
    data, model = prompt_dataset(settings, tokenizer), adapted(tokenizer)
    task = data.task(settings)
    inputs, old, advantages, targets = task.sampled_batch(model, lambda: None)
    with forward_precision("float32", inputs.device, batch_invariant=True):
        found = task.loss(model, (inputs, old, advantages, targets))
    kept = targets != PADDED
    means = [gain * kept[row].sum() / kept[row].sum() for row, gain in enumerate(advantages)]
    assert found.item() == pytest.approx(-sum(means).item() / len(means), abs=1e-7)
    assert task.take_metrics()["sampling_logp_difference"] == 0
    found.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in getattr(model, LORA).parameters())


def test_a_whole_batch_invariant_run_has_ratios_of_exactly_1(tmp_path, tokenizer, reward):
    settings = config(tmp_path, batch_invariant=True, optimizer={"steps": 2})
    seen = Stopping()
    seen.metrics = lambda step, values: seen.values.update({step: values["sampling_logp_difference"]})
    Trainer(adapted(tokenizer), prompt_dataset(settings, tokenizer), settings).run(seen, seen.flag)
    assert seen.values == {1: 0, 2: 0}


def test_logits_are_divided_once_by_the_temperature(tokenizer):
    model, hidden = adapted(tokenizer), torch.randn(3, 16)
    assert torch.equal(Tempered(model, 0.5).logits(hidden), model.logits(hidden) * 2)


def test_a_completion_that_is_cut_off_can_be_left_out(tmp_path, tokenizer, reward):
    settings = config(tmp_path, mask_truncated_completions=True, max_completion_length=3)
    task, model = prompt_dataset(settings, tokenizer).task(settings), adapted(tokenizer)
    end = tokenizer.id(".")
    kept = [task.sampled_batch(model, lambda: None)[-1] for _ in range(4)]
    ends = [[token for token in row if token != PADDED] for targets in kept for row in targets.tolist()]
    assert any(ends)
    assert not all(ends)
    assert all(row[-1] == end for row in ends if row)
    assert 0 < task.take_metrics()["truncated_share"] < 1


class Stopping(NullReporter):
    """Records metrics, and stops after a step."""

    def __init__(self, stop_after=None):
        self.values, self.flag, self.stop_after = {}, StopFlag(), stop_after

    def metrics(self, step, values):
        kept = ("loss", "reward", "reward_std", "kl", "clip_ratio", "completion_length", "truncated_share")
        self.values[step] = {name: values[name] for name in kept if name in values}
        if step == self.stop_after:
            self.flag.set(Stop.SAVE)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_resumed_run_is_the_same_run_in_the_middle_of_what_it_has_sampled(tmp_path, tokenizer, reward, accumulated):
    optimizer = {"gradient_accumulation_steps": accumulated}
    settings = config(tmp_path, num_iterations=3, beta=BETA, optimizer=optimizer)

    def trainer(folder):
        data = prompt_dataset(settings, tokenizer)
        return Trainer(adapted(tokenizer), data, settings, checkpoints=CheckpointFolder(tmp_path / folder))

    whole, begun, rest = Stopping(), Stopping(4), Stopping()
    trainer("whole").run(whole, whole.flag)
    assert trainer("parts").run(begun, begun.flag) is Stop.SAVE
    resumed = trainer("parts")
    assert resumed.resume()
    resumed.run(rest, rest.flag)
    assert begun.values | rest.values == whole.values
    assert [step for step, values in whole.values.items() if "reward" in values] == [1, 4], "when it samples"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda completions: [1 / (len(text) < 3) for text in completions], "ZeroDivisionError.*line"),
        (lambda completions: [math.nan if place == 3 else 0.0 for place in range(len(completions))], "nan.*3.*line"),
        (lambda completions: [0.0], "returned 1 rewards for 8 completions"),
        (lambda completions: 0.5, "returned 0.5 for 8 completions"),
        (lambda completions: sys.exit("done"), "SystemExit: done for completion 0"),
        (lambda completions: [None] * len(completions), "returned None for completion 0"),
        (lambda completions: ["good"] * len(completions), "returned good.*completion 0"),
    ],
)
def test_a_reward_that_fails_is_named_with_the_completion_and_the_last_checkpoint_stays(
    tmp_path, tokenizer, reward, function, said
):
    settings = config(tmp_path)
    reward(lambda completions: [0.5] * len(completions))
    checkpoints = CheckpointFolder(tmp_path / "job")
    trainer = Trainer(adapted(tokenizer), prompt_dataset(settings, tokenizer), settings, checkpoints=checkpoints)
    reporter = Stopping(2)
    assert trainer.run(reporter, reporter.flag) is Stop.SAVE
    reward(function)
    resumed = Trainer(adapted(tokenizer), prompt_dataset(settings, tokenizer), settings, checkpoints=checkpoints)
    resumed.resume()
    with pytest.raises(RewardFailed, match=said):
        resumed.run(NullReporter(), StopFlag())
    assert checkpoints.newest_whole(lambda *_: None).step == 2


def test_a_reward_is_told_of_before_it_is_called_and_after(tmp_path, tokenizer, reward):
    told = []
    reward(lambda completions: told.append("called") or [0.0] * len(completions))
    with telling(lambda: told.append(now())):
        prompt_dataset(config(tmp_path), tokenizer).rewards(Scored(["a"], ["line 1"], [{}], ["b"], [(1,)]))
    assert told == ["the reward 'mine'", "called", ""]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_generations": 1}, "num_generations"),
        ({"num_generations": 3}, "batch_size.*multiple of num_generations"),
        ({"reward_funcs": ()}, "reward_funcs"),
        ({"reward_weights": (1.0, 2.0)}, "reward_weights"),
        ({"lmbda": 0.5}, "lmbda"),
        ({"loss_type": "dapo", "importance_sampling_level": "sequence"}, "loss_type"),
        ({"max_completion_length": 24}, "max_completion_length.*24"),
        ({"max_completion_length": 23}, "shortest of 3 input tokens.*at most 1 "),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, tokenizer, reward, change, said):
    with pytest.raises(InvalidValue, match=said):
        prompt_dataset(config(tmp_path, rows=[{"prompt": "abc"}], **change), tokenizer)


def test_a_row_without_the_column_that_a_reward_needs_is_named(tmp_path, tokenizer, reward):
    reward(lambda completions, answer: [0.0] * len(completions))
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a", "solution": "b"}]
    with pytest.raises(InvalidValue, match=r"line 2 without answer.*--columns"):
        prompt_dataset(config(tmp_path, rows=rows), tokenizer)
    renamed = config(tmp_path, rows=rows[1:])
    renamed = renamed.replace(data=renamed.data.replace(columns=("answer=solution",)))
    assert prompt_dataset(renamed, tokenizer).training[0].columns == {"answer": "b"}


def test_an_unknown_reward_is_named_beside_those_that_exist():
    with pytest.raises(Exception, match=r"(?s)'acuracy'.*accuracy"):
        rewards.RewardFunction("acuracy")
    assert {"accuracy", "json_schema", "regex"} <= set(installed().rewards.names())


def test_the_ratio_is_one_and_the_gradient_that_of_the_policy_where_nothing_has_moved():
    logs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages, rows = torch.tensor([2.0, -1.0]), torch.tensor([0, 0, 1])
    loss, measured = grpo_loss((logs, logs.detach(), None), advantages, rows, OnPolicyConfig(loss_type="grpo"))
    loss.backward()
    assert loss.item() == -0.5
    assert measured["clip_ratio"] == 0
    assert logs.grad.tolist() == [-0.5, -0.5, 0.5]


@pytest.mark.parametrize(("equal", "said"), [(True, 1), (False, 0)])
def test_rewards_that_teach_nothing_are_said_once(tmp_path, tokenizer, reward, equal, said):
    """As TRL's `frac_reward_zero_std`, the share of prompts whose completions all have the same reward."""
    reward(lambda completions: [0.5 if equal else place % 2 for place in range(len(completions))])
    settings = config(tmp_path, optimizer={"steps": 60})
    seen, shares = Stopping(), []
    lines, seen.log = [], lambda text: lines.append(text)
    seen.metrics = lambda step, values: shares.append(values["frac_reward_zero_std"])
    Trainer(adapted(tokenizer), prompt_dataset(settings, tokenizer), settings).run(seen, seen.flag)
    assert set(shares) == {float(equal)}
    assert sum("frac_reward_zero_std" in line for line in lines) == said
