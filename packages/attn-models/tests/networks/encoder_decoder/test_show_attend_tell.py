"""Show, Attend and Tell: the paper's equations in loops, steps, folders, and images that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from attn_core import RaggedBatch, installed, state_bytes
from attn_core.errors import Incompatible, InvalidValue
from attn_models.loading import load_model, save_model
from attn_models.losses import doubly_stochastic_penalty
from attn_testing import DictionaryStore
from attn_testing.checkpoints import require_same_model
from torch import nn

GRID = {"rows": 3, "columns": 4, "max_encoder_len": 13}
SMALL = GRID | {"vocab_size": 19, "max_seq_len": 12, "hidden_size": 5, "embedding": 7, "features": 6, "convolutions": 2}
MECHANISMS = {"visual_soft": {}, "visual_hard": {}, "alignment": {}, "mha": {"num_heads": 2}}
EVERY = pytest.mark.parametrize("mechanism", MECHANISMS)


def build(mechanism="visual_soft", **values):
    family = installed().models.get("show_attend_tell")
    torch.manual_seed(0)
    fields = SMALL | {"mechanism": mechanism} | MECHANISMS[mechanism] | values
    model = family.build(family.configure(fields)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def image(seed=1, batch=1):
    return torch.randint(19, (batch, 12), generator=torch.Generator().manual_seed(seed))


def sigmoid(rows):
    return 1 / (1 + torch.exp(-rows))


def annotations(model, cells):
    """What two convolutions of 3 x 3 make of the grid, cell by cell and neighbour by neighbour."""
    seen = {(r, c): model.shades.weight[cells[4 * r + c]] + model.places[4 * r + c] for r in range(3) for c in range(4)}
    for layer in model.convolutions:
        after = {}
        for r, c in seen:
            near = [(dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1) if (r + dr, c + dc) in seen]
            total = sum(layer.weight[:, :, dr + 1, dc + 1] @ seen[r + dr, c + dc] for dr, dc in near)
            after[r, c] = (total + layer.bias).clamp(min=0)
        seen = after
    return [seen[r, c] for r in range(3) for c in range(4)]


def told(model, cells, tokens):
    """Logits of Xu et al. 2015, equations 1 to 7, token by token."""
    seen = torch.stack(annotations(model, cells))
    mean = seen.mean(0)
    hidden, cell = (torch.tanh(model.begin[name](mean)) for name in ("hidden", "cell"))
    rows, lstm = [], model.decoder
    for token in tokens:
        word = model.embedding.weight[token]
        found = model.attention(model.ask(hidden)[None, None], seen[None])[0, 0]
        gates = lstm.weight_ih_l0 @ torch.cat([word, found]) + lstm.bias_ih_l0
        enter, forget, candidate, leave = (gates + lstm.weight_hh_l0 @ hidden + lstm.bias_hh_l0).chunk(4)
        cell = sigmoid(forget) * cell + sigmoid(enter) * torch.tanh(candidate)
        hidden = sigmoid(leave) * torch.tanh(cell)
        shown = word + model.of_state.weight @ hidden + model.of_seen.weight @ found
        rows.append(model.unembedding.weight @ shown + model.unembedding.bias)
    return torch.stack(rows)


@EVERY
def test_a_caption_is_told_as_the_equations_say(mechanism):
    model, tokens = build(mechanism), torch.randint(19, (1, 9))
    with torch.no_grad():
        expected = told(model, image()[0].tolist(), tokens[0].tolist())
        torch.testing.assert_close(model(tokens, image())[0], expected, rtol=0, atol=1e-11)


@EVERY
def test_steps_of_captions_of_many_images_give_what_whole_captions_give(mechanism):
    model, images, tokens = build(mechanism), image(batch=3), torch.randint(19, (3, 6))
    store = DictionaryStore(model.state_specs())
    for request in range(3):
        store.admit(request)
        with torch.no_grad():
            store.write_source(request, model.encode(images[request]))
    done, found = [0, 0, 0], [[], [], []]
    for counts in ([4, 1, 0], [1, 2, 6], [1, 3, 0]):
        rows = [r for r, count in enumerate(counts) if count]
        batch = RaggedBatch.of([counts[r] for r in rows], [done[r] for r in rows], torch.tensor)
        new = torch.cat([tokens[r, done[r] : done[r] + counts[r]] for r in rows])
        with torch.no_grad():
            logits = model.logits(model.step(new, batch, store.view(batch, rows)))
        for span in batch.spans():
            found[rows[span.request]].append(logits[span.start : span.stop])
        done = [before + count for before, count in zip(done, counts, strict=True)]
    torch.testing.assert_close(torch.stack([torch.cat(part) for part in found]), model(tokens, images))


def test_the_token_that_ends_a_grid_is_no_cell():
    model, tokens = build(), torch.randint(19, (2, 5))
    ended = torch.cat([image(batch=2), torch.full((2, 1), 3)], dim=1)
    assert torch.equal(model(tokens, ended), model(tokens, image(batch=2)))


def test_every_cell_is_seen_and_where_it_is_matters():
    model, tokens = build(), torch.randint(19, (1, 4))
    before = model(tokens, image())
    for cell in range(12):
        changed = image()
        changed[0, cell] = (changed[0, cell] + 1) % 19
        assert not torch.isclose(model(tokens, changed), before).all(), cell
    assert not torch.isclose(model(tokens, image().flip(1)), before).all()


@pytest.mark.parametrize("cells", [1, 11, 14])
def test_an_image_that_is_not_the_grid_is_refused(cells):
    model = build(max_encoder_len=13)
    with pytest.raises(InvalidValue, match=r"3 rows of 4 cells|at most 13"):
        model(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, cells, dtype=torch.int64))


def test_what_is_remembered_of_an_image_is_as_many_rows_as_it_has_cells():
    model = build()
    written = model.encode(torch.cat([image()[0], torch.tensor([3])]))
    for layer, specs in model.state_specs().items():
        held = sum(rows.nbytes for fields in written.get(layer, {}).values() for rows in fields.values())
        sources = {name: spec for name, spec in specs.items() if name in written.get(layer, {})}
        assert held == state_bytes(sources, tokens=5, source=13, dtype="float64")


def test_maps_say_at_which_cells_each_word_looked():
    model, tokens = build(num_heads=2, mechanism="mha"), torch.randint(19, (5,))
    maps = model.attention_maps(tokens, [0], image()[0])[0]
    assert maps.shape == (2, 5, 12)
    torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))


def test_a_folder_gives_the_model_back(tmp_path):
    model, tokens = build().float(), torch.randint(19, (1, 5))
    save_model(tmp_path / "model", model)
    loaded = load_model(tmp_path / "model")
    assert (loaded.family, loaded.mechanisms, loaded.max_encoder_len) == ("show_attend_tell", ("visual_soft",), 13)
    require_same_model(loaded.model, model, tokens, image())


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"max_encoder_len": 12}, InvalidValue, r"max_encoder_len: 12.*13: 3 rows of 4 cells"),
        ({"rows": 0}, InvalidValue, "rows: 0"),
        ({"features": 7, "num_heads": 2}, InvalidValue, "num_heads"),
        ({"mechanism": "linear"}, Incompatible, "cross"),
        ({"convolutions": 0}, InvalidValue, "convolutions"),
        ({"doubly_stochastic": -1.0}, InvalidValue, "doubly_stochastic"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(change, error, said):
    with pytest.raises(error, match=said):
        installed().models.get("show_attend_tell").configure(SMALL | change)


def test_the_doubly_stochastic_penalty_is_the_paper_s_sum_over_real_words_and_cells():
    """Σ_i (1 - Σ_t α_ti)² of each caption, from the maps of its words one by one."""
    model, tokens, images = build(doubly_stochastic=1.0), torch.randint(19, (2, 6)), image(batch=2)
    counts = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expected = 0.0
    for row, words in enumerate((6, 4)):
        alpha = model.attention_maps(tokens[row], [0], images[row])[0][0]
        for cell in range(12):
            expected += (1 - sum(alpha[t, cell] for t in range(words))) ** 2
    logits, weights, cells = model.forward_with_weights(tokens, images)
    torch.testing.assert_close(doubly_stochastic_penalty(weights, counts, cells), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits, model(tokens, images), rtol=0, atol=1e-12)
    assert torch.autograd.grad(expected, model.ask.weight)[0].abs().max() > 0


def test_weights_without_gradient_cannot_be_penalised():
    with pytest.raises(InvalidValue, match=r"doubly_stochastic.*visual_hard"):
        build("visual_hard", doubly_stochastic=1.0)


def test_the_mean_of_equal_annotations_is_seen_whatever_the_weights():
    model = build()
    with torch.no_grad():
        for layer in model.convolutions:
            layer.weight.zero_()
            layer.bias.fill_(0.7)
        maps = model.attention_maps(torch.randint(19, (4,)), [0], image()[0])[0]
    torch.testing.assert_close(maps, torch.full_like(maps, 1 / 12))
    assert math.isclose(maps.sum().item(), 4.0)
