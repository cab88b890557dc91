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


def test_cl_39_heads_made_of_the_old_ones_recover_what_was_lost_and_fresh_ones_do_not(tiny):
    """Of eight seeds these hold for all; means are ahead of first heads in five only: `attn reproduce CL-39`."""
    torch.manual_seed(0)
    model = train(Decoder(tiny(vocab_size=8, hidden_size=32, num_heads=4, max_seq_len=18)), STEPS)
    held_out = sequences(50).flatten().tolist()[:900]
    before, lost, left = text_loss(model, held_out, 18), {}, {}
    for method in ("mean", "first", "random"):
        converted, _ = fewer_heads(model, HeadMap((0, 0, 1, 1)), method)
        lost[method] = text_loss(converted, held_out, 18) - before
        left[method] = text_loss(train(converted, FURTHER), held_out, 18) - before
    for method in ("mean", "first"):
        assert 0.1 < lost[method] < lost["random"], lost
        assert left[method] < lost[method] / 4, (lost, left)
        assert left[method] < left["random"] / 2, left


@pytest.mark.parametrize("method", ["mean", "first"])
def test_cl_39_heads_that_are_alike_lose_nothing(tiny, method):
    torch.manual_seed(0)
    model = Decoder(tiny(num_heads=4)).double()
    with torch.no_grad():
        for block in model.blocks:
            for part in (block.attention.key, block.attention.value):
                heads = part.weight.unflatten(0, (4, -1))
                heads[1], heads[3] = heads[0], heads[2]
    tokens = torch.randint(31, (2, 9))
    converted, energy = fewer_heads(model, HeadMap((0, 0, 1, 1)), method)
    assert energy == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(converted(tokens), model(tokens), rtol=0, atol=1e-12)


def test_cl_39_no_other_heads_are_as_near_as_the_means(tiny):
    """The mean is the least-squares fit: first heads and fresh ones keep less of the old weights."""
    model = Decoder(tiny(num_heads=4))
    kept = {method: fewer_heads(model, HeadMap((0, 0, 1, 1)), method)[1] for method in ("mean", "first", "random")}
    assert kept["mean"] > max(kept["first"], kept["random"])
