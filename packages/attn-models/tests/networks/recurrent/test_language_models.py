"""Language models of the recurrent era: the papers' equations in loops, limits, steps, folders and what they refuse."""

from __future__ import annotations

import json
import math

import pytest
import torch
from attn_core import installed
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from attn_testing.checkpoints import require_same_model
from torch import nn

BASE = {"vocab_size": 13, "max_seq_len": 24, "hidden_size": 6}
MODELS = {
    "key-value-predict": ("key_value_lm", {"embedding": 5, "options": {"window": 3}}),
    "key-value": ("key_value_lm", {"embedding": 5, "num_lstm_layers": 2, "num_heads": 2, "mechanism": "key_value"}),
    "softmax over an LSTM": ("key_value_lm", {"embedding": 6, "mechanism": "mha", "num_heads": 2}),
    "replayed": ("key_value_lm", {"embedding": 4, "mechanism": "running_mean"}),
    "lstmn": ("lstmn_lm", {"num_layers": 2}),
    "turing machine": ("turing_machine", {"num_heads": 2, "head_dim": 4, "options": {"slots": 5}}),
}
EVERY = pytest.mark.parametrize("kind", MODELS)
pytestmark = pytest.mark.usefixtures("strangers")


def build(name, **values):
    family = installed().models.get(name)
    torch.manual_seed(0)
    model = family.build(family.configure(BASE | values)).double().eval()
    for parameter in model.parameters():  # far from the small initial weights, so that every path counts
        nn.init.normal_(parameter, std=0.5)
    return model


def made(kind):
    name, values = MODELS[kind]
    return build(name, **values)


def sigmoid(rows):
    return 1 / (1 + torch.exp(-rows))


def lstm_cell(stack, row, hidden, cell):
    """One moment of the LSTM of Hochreiter and Schmidhuber with forget gates, in torch's order of gates."""
    gates = stack.weight_ih_l0 @ row + stack.bias_ih_l0 + stack.weight_hh_l0 @ hidden + stack.bias_hh_l0
    enter, forget, candidate, leave = gates.chunk(4)
    cell = sigmoid(forget) * cell + sigmoid(enter) * torch.tanh(candidate)
    return sigmoid(leave) * torch.tanh(cell), cell


def key_value_predict(model, tokens, window):
    """The logits of Daniluk et al. 2017, equations 2 to 7 and 11, token by token."""
    layer, outputs = model.attentions[0], []
    hidden = cell = torch.zeros(6, dtype=torch.float64)
    keys, values = [], []
    for token in tokens.tolist():
        hidden, cell = lstm_cell(model.lstm, model.embedding.weight[token], hidden, cell)
        key, value, predict = (layer.split.weight @ hidden).split(6)
        seen = list(zip(keys, values, strict=True))[-window:]
        scores = [layer.vector[0] @ torch.tanh(k @ layer.of_past[0] + key @ layer.of_own[0]) for k, _ in seen]
        total = sum(math.exp(score) for score in scores)
        read = sum((math.exp(s) / total * v for s, (_, v) in zip(scores, seen, strict=True)), torch.zeros(6).double())
        out = torch.tanh(read @ layer.of_read[0] + predict @ layer.of_last[0])
        outputs.append(model.unembedding.weight @ (layer.output.weight @ out) + model.unembedding.bias)
        keys.append(key)
        values.append(value)
    return torch.stack(outputs)


def test_the_key_value_predict_model_is_that_of_its_paper_in_loops():
    model, tokens = made("key-value-predict"), torch.randint(13, (11,))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[None])[0], key_value_predict(model, tokens, 3), rtol=0, atol=1e-12)


def lstmn(layer, rows):
    """The outputs of one layer of Cheng et al. 2016, equations 4 to 9, token by token, with the paper's one head."""
    hiddens, cells, outputs = [], [], []
    summary = torch.zeros(6, dtype=torch.float64)
    for row in rows:
        read_hidden = read_cell = torch.zeros(6, dtype=torch.float64)
        if hiddens:
            asked = layer.attend_input.weight @ row + summary @ layer.attend_summary[0]
            scores = [layer.vector[0] @ torch.tanh(hidden @ layer.attend_hidden[0] + asked) for hidden in hiddens]
            total = sum(math.exp(score) for score in scores)
            parts = [math.exp(score) / total for score in scores]
            read_hidden = sum(part * hidden for part, hidden in zip(parts, hiddens, strict=True))
            read_cell = sum(part * cell for part, cell in zip(parts, cells, strict=True))
        gates = layer.gates.weight @ row + layer.gates.bias + read_hidden @ layer.recurrent[0]
        enter, forget, candidate, leave = gates.chunk(4)
        cells.append(sigmoid(forget) * read_cell + sigmoid(enter) * torch.tanh(candidate))
        hiddens.append(sigmoid(leave) * torch.tanh(cells[-1]))
        summary = read_hidden
        outputs.append(layer.output.weight @ hiddens[-1])
    return outputs


def test_the_lstmn_is_that_of_its_paper_in_loops():
    model, tokens = made("lstmn"), torch.randint(13, (9,))
    with torch.no_grad():
        rows = [model.embedding.weight[token] for token in tokens]
        for layer in model.attentions:
            rows = lstmn(layer, rows)
        expected = torch.stack([model.unembedding.weight @ row + model.unembedding.bias for row in rows])
        torch.testing.assert_close(model(tokens[None])[0], expected, rtol=0, atol=1e-12)


def test_an_lstmn_that_sees_one_earlier_state_is_an_lstm():
    model, tokens = build("lstmn_lm"), torch.randint(13, (7, 2))
    layer = model.attentions[0]
    cell = nn.LSTM(6, 6, batch_first=True).double()
    with torch.no_grad():
        cell.weight_ih_l0.copy_(layer.gates.weight)
        cell.weight_hh_l0.copy_(layer.recurrent[0].T)
        cell.bias_ih_l0.copy_(layer.gates.bias)
        cell.bias_hh_l0.zero_()
        expected = model.unembedding(layer.output(cell(model.embedding(tokens))[0]))
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-12)


def test_a_turing_machine_that_writes_and_reads_nothing_knows_only_the_newest_token():
    model = made("turing machine")
    layer = model.attentions[0]
    with torch.no_grad():
        layer.start.zero_()
        layer.interface.weight.zero_()
        layer.interface.bias.zero_()  # what is added to the empty memory is nothing
        tokens = torch.tensor([[1, 5, 2, 5, 5]])
        logits = model(tokens)[0]
        # Rows of one product of matrices may be added up in different orders.
        torch.testing.assert_close(logits[1], logits[3], rtol=0, atol=1e-12)
        torch.testing.assert_close(logits[3], logits[4], rtol=0, atol=1e-12)
        layer.interface.bias.fill_(0.5)
        logits = model(tokens)[0]
    assert not torch.isclose(logits[3], logits[4]).all()


@EVERY
def test_no_logit_depends_on_a_later_token(kind):
    model, tokens = made(kind), torch.randint(13, (3, 9))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 13
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :6], after[:, :6], rtol=0, atol=1e-12)
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(-1).any()


@EVERY
def test_steps_of_many_requests_give_what_the_whole_sequences_give(kind, stepwise):
    model = made(kind)
    prompts = [torch.randint(13, (length,)).tolist() for length in (20, 7, 3)]
    plan = [[6, 9, 1, 1, 1, 1, 1], [0, 3, 1, 1, 1, 1, 0], [3, 0, 0, 0, 0, 0, 0]]
    with torch.no_grad():
        for prompt, stepped in zip(prompts, stepwise(model, prompts, plan), strict=True):
            # What a machine remembers between steps is float32.
            tolerance = 1e-4 if kind == "turing machine" else 1e-10
            torch.testing.assert_close(stepped, model(torch.tensor([prompt]))[0], rtol=0, atol=tolerance)


@EVERY
def test_the_loss_of_a_text_that_repeats_itself_falls(kind):
    name, values = MODELS[kind]
    family = installed().models.get(name)
    torch.manual_seed(0)
    model = family.build(family.configure(BASE | values | {"hidden_size": 24, "head_dim": None, "num_heads": 2}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    text = (torch.arange(19) * 7 % 11)[None].expand(2, -1)
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@EVERY
def test_a_folder_gives_the_model_back(kind, tmp_path):
    model, tokens = made(kind).float(), torch.randint(13, (2, 9))
    save_model(tmp_path / "model", model, character_tokenizer("abcdefghijklm"))
    loaded = load_model(tmp_path / "model")
    name, _ = MODELS[kind]
    assert (loaded.family, loaded.max_encoder_len) == (name, None)
    assert set(loaded.mechanisms) == {model.config.mechanism.rpartition("/")[2]}
    require_same_model(loaded.model, model, tokens)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "attn_language_model"


@pytest.mark.parametrize("kind", ["key-value-predict", "lstmn", "softmax over an LSTM"])
def test_maps_say_where_each_token_looked(kind):
    model, tokens = made(kind), torch.randint(13, (9,))
    maps = model.attention_maps(tokens, [0])[0]
    assert maps.shape == (model.config.num_heads, 9, 9)
    assert torch.equal(maps, maps.tril())
    torch.testing.assert_close(maps[:, 3:].sum(-1), torch.ones_like(maps[:, 3:, 0]))
    with pytest.raises(InvalidValue, match="layers: 7"):
        model.attention_maps(tokens, [7])


def test_a_machine_without_weights_says_that_it_has_none():
    with pytest.raises(Incompatible, match="'ntm' returns no attention weights"):
        made("turing machine").attention_maps(torch.randint(13, (9,)), [0])


def test_a_text_longer_than_the_context_is_refused():
    with pytest.raises(InvalidValue, match=r"25 tokens.*at most the context of 24"):
        made("lstmn")(torch.zeros(1, 25, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "values", "error", "said"),
    [
        ("lstmn_lm", {"mechanism": "lstmm"}, UnknownName, "lstmn"),
        ("lstmn_lm", {"mechanism": "alignment"}, Incompatible, "causal"),
        ("lstmn_lm", {"num_layers": 0}, InvalidValue, "num_layers: 0"),
        ("lstmn_lm", {"num_heads": 4}, InvalidValue, "num_heads: 4"),
        ("lstmn_lm", {"dropout": 1.0}, InvalidValue, "dropout"),
        ("lstmn_lm", {"max_encoder_len": 5}, UnknownName, "max_encoder_len"),
        ("key_value_lm", {}, InvalidValue, "embedding"),
        ("key_value_lm", {"embedding": 4, "options": {"window": 0}}, InvalidValue, "window"),
        ("turing_machine", {"options": {"slots": 2}}, InvalidValue, "shift"),
        ("turing_machine", {"options": {"rows": 2}}, UnknownName, "rows"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(name, values, error, said):
    with pytest.raises(error, match=said):
        installed().models.get(name).configure(BASE | values)


def test_a_folder_with_a_larger_vocabulary_than_its_model_is_refused(tmp_path):
    save_model(tmp_path / "model", made("lstmn").float(), character_tokenizer("abcdefghijklmnop"))
    with pytest.raises(CheckpointInvalid, match="16 tokens, but the embedding only 13 rows"):
        load_model(tmp_path / "model")
