"""What a conversion costs in loss, and that a little training brings most of it back."""

import random

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.conversion import HeadMap, fewer_heads
from attn_models.decoder.decoder import Decoder
from attn_models.evaluation import text_loss
from torch.nn.functional import cross_entropy

STEPS, FURTHER = 160, 40


def test_the_loss_is_the_mean_over_all_tokens_but_the_first_each_after_those_of_its_window(tiny):
    model = Decoder(tiny(max_seq_len=5)).double().eval()
    tokens = [random.Random(0).randrange(31) for _ in range(12)]
    expected = []
    with torch.no_grad():
        for start in (0, 5, 10):
            for end in range(start + 1, min(start + 6, 12)):
                probabilities = model(torch.tensor([tokens[start:end]]))[0, -1].softmax(-1)
                expected.append(-probabilities[tokens[end]].log().item())
    assert text_loss(model, tokens, 5) == pytest.approx(sum(expected) / 11, abs=1e-12)
    assert text_loss(model, tokens[:11], 5) == pytest.approx(sum(expected[:10]) / 10, abs=1e-12)


def test_a_text_of_one_token_is_refused(tiny):
    with pytest.raises(InvalidValue):
        text_loss(Decoder(tiny()), [1], 5)


def sequences(count):
    """Each repeats a random beginning, which a model can only do by looking back."""
    rng = random.Random(count)
    rows = [[rng.randrange(8) for _ in range(6)] for _ in range(count)]
    return torch.tensor([row * 3 for row in rows])


def train(model, steps):
    torch.manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = sequences(32 * STEPS).split(32)
    for step in range(steps):
        tokens = data[step]
        loss = cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def test_cl_39_means_lose_less_than_first_heads_and_these_less_than_random_ones_and_training_closes_the_gap(tiny):
    torch.manual_seed(0)
    model = train(Decoder(tiny(vocab_size=8, hidden_size=32, num_heads=4, max_seq_len=18)), STEPS)
    held_out = sequences(50).flatten().tolist()[:900]
    losses = {"before": text_loss(model, held_out, 18)}
    further = {}
    for method in ("mean", "first", "random"):
        converted, _ = fewer_heads(model, HeadMap((0, 0, 1, 1)), method)
        losses[method] = text_loss(converted, held_out, 18)
        further[method] = text_loss(train(converted, FURTHER), held_out, 18)
    assert losses["before"] < losses["mean"] < losses["first"] < losses["random"], losses
    assert further["mean"] - losses["before"] < (losses["mean"] - losses["before"]) / 2, (losses, further)
