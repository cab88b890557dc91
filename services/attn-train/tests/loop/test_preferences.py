"""Losses of preferences, whole tasks with model and adapter, are those of loops over float64 numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.evaluation import IGNORED
from attn_models.lora import AdaptedModel, AdapterConfig, LoraAdapter
from attn_models.tokenizers import Tokenizer, character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema.finetuning import LoraConfig, ObjectiveConfig
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.base_model import LORA
from attn_train.model import configured
from attn_train.tasks.preferences import PreferenceDataset, answered, preference_dataset
from small_tasks import DECODER

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'][0] + '>' + m['content'] + '.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)
PAIRS = [("hi", "yes", "no way"), ("why", "because", "so"), ("and", "then what", "a"), ("ok", "b", "never again")]


@pytest.fixture
def tokenizer():
    return Tokenizer(
        character_tokenizer("<>abcdefghijklmnopqrstuvwxyz. ").backend,
        TokenizerSettings(chat_template=TEMPLATE, eos_token="."),
    )


def dataset(path, tokenizer, loss, rows=None):
    rows = rows or [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(dataset=str(path), validation_fraction=0.0)
    return preference_dataset(data, tokenizer, loss=loss, max_length=40)


def adapted(tokenizer):
    """A decoder in float64 whose adapter already differs from the base."""
    torch.manual_seed(3)
    family, made = configured(DECODER.replace(max_seq_len=64), {"vocab_size": tokenizer.vocab_size})
    model = family.build(made).double()
    adapter = LoraAdapter.fresh(model, AdapterConfig(r=2, lora_alpha=4.0), modules={}).double()
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.3)
    model.adapted = AdaptedModel(model)
    model.adapted.always(adapter)
    model.add_module(LORA, adapter)
    return model


def log_probability(model, chat, reference):
    """The sum over the answer, token by token, and the number of tokens."""
    with torch.no_grad():
        if reference:
            with model.adapted.without():
                logits = model(torch.tensor([chat.inputs]))[0].tolist()
        else:
            logits = model(torch.tensor([chat.inputs]))[0].tolist()
    total, count = 0.0, 0
    for row, target in zip(logits, chat.targets, strict=True):
        if target != IGNORED:
            total += row[target] - math.log(sum(map(math.exp, row)))
            count += 1
    return total, count


def sigma(x):
    return 1 / (1 + math.exp(-x))


def log_odds(x):
    return math.log(math.exp(x) / (1 - math.exp(x)))


BETA, GAMMA, SHARE = 0.7, 0.4, 0.2
LOOPS = {
    "sigmoid": lambda w, r: -math.log(sigma(BETA * (w - r))),
    "sigmoid_norm": lambda w, r: -math.log(sigma(BETA * (w - r))),
    "hinge": lambda w, r: max(0.0, 1 - BETA * (w - r)),
    "ipo": lambda w, r: (w - r - 1 / (2 * BETA)) ** 2,
    "robust": lambda w, r: (
        (-(1 - SHARE) * math.log(sigma(BETA * (w - r))) + SHARE * math.log(sigma(-BETA * (w - r)))) / (1 - 2 * SHARE)
    ),
    "apo_zero": lambda w, r: 1 - sigma(BETA * w) + sigma(BETA * r),
    "apo_down": lambda w, r: sigma(BETA * w) + 1 - sigma(BETA * (w - r)),
    "simpo": lambda w, r: -math.log(sigma(BETA * (w - r) - GAMMA)),
    "orpo": lambda w, r: -w - BETA * math.log(sigma(log_odds(w) - log_odds(r))),
}
PER_TOKEN = {"sigmoid_norm", "ipo", "simpo", "orpo"}
OPTIONS = {"simpo": {"simpo_gamma": GAMMA}, "robust": {"flipped_share": SHARE}}


def task_of(data, **objective):
    chosen = ObjectiveConfig(preference_beta=BETA, **objective)
    config = TrainingConfig(
        model=ModelConfig(base_model="base"),
        data=DataConfig(dataset="/x", format="preference", tokenizer="base"),
        lora=LoraConfig(lora_rank=2),
        objective=chosen,
        optimizer=OptimizerConfig(batch_size=4),
    )
    return data.task(config)


@pytest.mark.parametrize("loss", LOOPS)
def test_the_loss_of_pairs_is_that_of_a_loop_over_their_tokens(tmp_path, tokenizer, loss):
    data, model = dataset(tmp_path / "a.jsonl", tokenizer, loss), adapted(tokenizer)
    task = task_of(data, preference_loss=loss, **OPTIONS.get(loss, {}))
    expected = 0.0
    for pair in data.training:
        rewards = []
        for chat in pair.chats:
            policy, count = log_probability(model, chat, reference=False)
            reference = 0.0 if loss in ("simpo", "orpo") else log_probability(model, chat, reference=True)[0]
            rewards.append((policy - reference) / (count if loss in PER_TOKEN else 1))
        expected += LOOPS[loss](*rewards) / len(data.training)
    assert task.loss(model, task.next_batch()).item() == pytest.approx(expected, rel=1e-10)
    task.loss(model, task.next_batch()).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in getattr(model, LORA).parameters())


def test_prepared_preferences_are_not_read_to_describe_them(tokenizer):
    class Prepared(Sequence):
        def __len__(self):
            return 3

        def __getitem__(self, place):
            raise AssertionError(f"record {place} was read")

    found = PreferenceDataset(Prepared(), Prepared(), tokenizer)
    assert found.files == []
    assert found.summary.startswith("3 training")


def test_batches_of_answers_sorted_by_their_label_have_both_kinds(tmp_path, tokenizer):
    rows = [{"prompt": "abc"[n % 3], "completion": "abcdef"[n % 6], "label": n < 32} for n in range(64)]
    data = dataset(tmp_path / "a.jsonl", tokenizer, "kto", rows)
    drawn = task_of(data, preference_loss="kto")._epochs
    batches = [[data.training[place].desirable for place in drawn.next_batch()] for _ in range(16)]
    assert sum(map(sum, batches)) == 32
    assert sum(0 < sum(batch) < len(batch) for batch in batches) > 8


def test_the_loss_of_judged_answers_is_that_of_a_loop(tmp_path, tokenizer):
    rows = [{"prompt": p, "completion": c, "label": n % 2 == 0} for n, (p, c, _) in enumerate(PAIRS)]
    data, model = dataset(tmp_path / "a.jsonl", tokenizer, "kto", rows), adapted(tokenizer)
    task = task_of(data, preference_loss="kto", desirable_weight=1.5, undesirable_weight=0.5)
    order = [data.training[place] for place in task_of(data, preference_loss="kto")._epochs.next_batch()]

    def ratio(chat):
        return log_probability(model, chat, reference=False)[0] - log_probability(model, chat, reference=True)[0]

    others = [answered(one.chat, other.chat) for one, other in zip(order, order[1:] + order[:1], strict=True)]
    for mixed, one, other in zip(others, order, order[1:] + order[:1], strict=True):
        text = tokenizer.decode([*mixed.inputs, mixed.targets[-1]])
        own, next_own = (tokenizer.decode([*judged.chat.inputs, judged.chat.targets[-1]]) for judged in (one, other))
        assert text == own.split("<a>")[0] + "<a>" + next_own.split("<a>")[1]
    z = max(0.0, sum(map(ratio, others)) / 4)
    expected = 0.0
    for judged in order:
        r = ratio(judged.chat)
        expected += (1.5 * (1 - sigma(BETA * (r - z))) if judged.desirable else 0.5 * (1 - sigma(BETA * (z - r)))) / 4
    assert task.loss(model, task.next_batch()).item() == pytest.approx(expected, rel=1e-10)
    pairs = dataset(tmp_path / "b.jsonl", tokenizer, "kto")
    assert [judged.desirable for judged in pairs.training] == [True, False] * 4
    with pytest.raises(InvalidValue, match="kto"):
        dataset(tmp_path / "a.jsonl", tokenizer, "sigmoid", rows)


def test_answers_of_which_the_model_is_certain_have_finite_gradients():
    from attn_train.tasks.preference_losses import log1mexp

    logs = torch.tensor([-1e-12, -1e-3, -0.5, -0.7, -30.0, -800.0], dtype=torch.float64, requires_grad=True)
    expected = [math.log(-math.expm1(x)) for x in logs.tolist()]
    assert log1mexp(logs).tolist() == pytest.approx(expected, rel=1e-12)
    log1mexp(logs).sum().backward()
    assert logs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"preference_loss": "simpo", "flipped_share": 0.1}, "flipped_share.*robust"),
        ({"simpo_gamma": 0.1}, "simpo_gamma.*simpo"),
        ({"preference_loss": "kto", "flipped_share": 0.5}, "flipped_share"),
        ({"preference_loss": "dpo"}, "preference_loss"),
    ],
)
def test_options_of_other_losses_are_refused(fields, complaint):
    with pytest.raises(InvalidValue, match=complaint):
        ObjectiveConfig(**fields)
