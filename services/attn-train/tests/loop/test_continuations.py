"""Tasks that are gone on with, and captions: what is given is no target, and what a model writes is counted."""

from __future__ import annotations

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_schema.training import ModelConfig
from attn_train.data.synthetic import HELD_OUT, NUMBERS, caption_pairs, digits, synthetic_pairs
from attn_train.model import configured
from attn_train.tasks.base import PADDED
from attn_train.tasks.completion import CompletionTask, collate, completion_dataset
from torch import nn


@pytest.fixture
def copies():
    return completion_dataset(synthetic_pairs("copy", 200, 0, longest=4), validation=0.1, max_length=12)


def task(copies, config):
    return CompletionTask(copies, config.replace(seed=3))


class Copyist(nn.Module):
    """Knows the rule: says token after token what stands before the equals sign, then the end."""

    def __init__(self, tokenizer):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))
        self.size, self.equals, self.end = tokenizer.vocab_size, tokenizer.encode("=")[0], min(tokenizer.end_ids)

    def forward(self, tokens):
        logits = torch.zeros(*tokens.shape, self.size)
        for row, ids in enumerate(tokens.tolist()):
            place = ids.index(self.equals)
            for after, said in enumerate([*ids[:place], self.end]):
                if place + after < len(ids):
                    logits[row, place + after, said] = 50.0
        return logits + 0 * self.unused


def test_only_what_is_to_be_written_is_a_target(copies):
    inputs, targets = collate(copies.training[:5])
    for row, text in enumerate(copies.training[:5]):
        length = len(text.given) + len(text.written) - 1
        assert inputs[row, :length].tolist() == [*text.given, *text.written[:-1]]
        assert targets[row][targets[row] != PADDED].tolist() == list(text.written)
        assert targets[row, len(text.given) - 1] == text.written[0]


def test_a_model_that_knows_the_rule_has_no_loss_and_another_has(copies, config):
    given, knows = task(copies, config), Copyist(copies.tokenizer)
    assert given.loss(knows, given.next_batch()).item() < 1e-9
    assert given.validation_loss(knows, 3, lambda: None) < 1e-9
    knows.end = 0
    assert given.validation_loss(knows, 3, lambda: None) > 1


def test_texts_are_words_kept_apart_and_no_longer_than_the_context(copies):
    assert (len(copies.training), len(copies.validation)) == (180, 20)
    assert copies.tokenizer.decode(copies.training[0].given).split()[-1] == "="
    few = completion_dataset(synthetic_pairs("copy", 200, 0, longest=4), validation=0.1, max_length=4)
    assert {len(text.given) + len(text.written) for text in few.training} == {4}
    with pytest.raises(InvalidValue, match="a length that fits at least one"):
        completion_dataset([("a b", "b a")], validation=0.0, max_length=3)


def test_batches_depend_on_the_seed_alone(copies, config):
    first, again = task(copies, config), task(copies, config)
    assert all(torch.equal(a, b) for a, b in zip(first.next_batch(), again.next_batch(), strict=True))
    assert first.tokens == again.tokens > 0


def test_answers_of_the_engine_are_counted_token_by_token(copies, config):
    torch.manual_seed(0)
    family, made = configured(ModelConfig(family="lstmn_lm", max_seq_len=12, hidden_size=16), copies.model_fields)
    model = family.build(made).eval()
    values = task(copies, config).final_metrics(model, lambda: None)
    right = 0
    for text in copies.validation:
        ids = list(text.given)
        while len(ids) < 12 and ids[-1] not in copies.tokenizer.end_ids:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        right += tuple(ids[len(text.given) :]) == text.written
    assert values == {"answer_accuracy": right / len(copies.validation)}


def test_captions_say_which_digits_stand_where():
    training, validation = caption_pairs(50, 0)
    assert (len(training), len(validation)) == (50, 5)
    assert caption_pairs(50, 0) == (training, validation) != caption_pairs(50, 1)
    known = digits()
    assert len(known) == 1797
    shown = {tuple(shade for row in rows for shade in row): name for rows, name in known}
    seen = {tuple(shade for row in rows for shade in row) for rows, _ in known[-HELD_OUT:]}
    for place, (source, said) in enumerate([*training, *validation]):
        pixels, words = source.split(), said.split()
        assert len(pixels) == 128
        assert set(map(int, pixels)) <= set(range(17))
        halves = [tuple(s for row in range(8) for s in pixels[16 * row + 8 * side :][:8]) for side in (0, 1)]
        sides = [half for half in halves if any(map(int, half))]
        assert [shown[half] for half in sides] == [word for word in words if word in NUMBERS]
        assert all((half in seen) == (place >= 50) for half in sides)
        if len(sides) == 1:
            assert words[-1] == ("left" if any(map(int, halves[0])) else "right")
