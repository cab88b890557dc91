"""Laws of every model that reads a source: steps equal the whole, padding says nothing, folders give the model back."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core import Field, Paged, RaggedBatch, Slot, installed, state_bytes
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.loading import load_model, save_model
from attn_testing import DictionaryStore
from attn_testing.checkpoints import require_same_model
from attn_testing.memory import rounding
from torch import nn

BASE = {"vocab_size": 23, "max_seq_len": 20, "max_encoder_len": 12, "hidden_size": 8}
RECURRENT = BASE | {"embedding": 6}
BLOCKS = BASE | {"num_layers": 2, "num_heads": 2, "intermediate_size": 12}
MODELS = {
    "bottleneck": ("bottleneck", RECURRENT | {"num_layers": 2}),
    "unreversed": ("bottleneck", RECURRENT | {"reverse_source": False}),
    "rnnsearch": ("rnnsearch", RECURRENT | {"maxout": 5}),
    "rnnsearch-mha": ("rnnsearch", RECURRENT | {"maxout": 5, "mechanism": "mha", "num_heads": 2}),
    "luong": ("luong", RECURRENT | {"num_layers": 2}),
    "luong-concat": ("luong", RECURRENT | {"options": {"score": "concat"}, "input_feeding": False}),
    "local_m": ("luong", RECURRENT | {"mechanism": "local_m", "options": {"radius": 2}}),
    "local_p": ("luong", RECURRENT | {"mechanism": "local_p", "options": {"radius": 3, "score": "dot"}}),
    "rnnsearch-coverage": ("rnnsearch", RECURRENT | {"maxout": 5, "mechanism": "coverage", "num_heads": 2}),
    "luong-coverage": ("luong", RECURRENT | {"mechanism": "coverage"}),
    "transformer": ("transformer", BLOCKS),
    "transformer-coverage": ("transformer", BLOCKS | {"cross": "coverage"}),
    "transformer-pre": ("transformer", BLOCKS | {"norm_place": "pre", "decoder": "linear", "cross": "alignment"}),
    "t5": ("t5", BLOCKS | {"head_dim": 3, "num_layers": 1, "num_decoder_layers": 2, "feed_forward": "geglu_tanh"}),
    "t5-untied": ("t5", BLOCKS | {"head_dim": 4, "tie_word_embeddings": False, "scale_output": False}),
}
EVERY = pytest.mark.parametrize("kind", MODELS)


def build(kind):
    name, values = MODELS[kind]
    family = installed().models.get(name)
    torch.manual_seed(0)
    model = family.build(family.configure(values)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def sources():
    key_padding_mask = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    return torch.randint(23, (3, 9), generator=torch.Generator().manual_seed(1)), key_padding_mask


@EVERY
def test_padding_of_sources_changes_nothing(kind):
    model, (source, key_padding_mask), tokens = build(kind), sources(), torch.randint(23, (3, 15))
    together = model(tokens, source, key_padding_mask)
    for row, length in enumerate(key_padding_mask.sum(-1)):
        alone = model(tokens[row, None], source[row, None, :length])
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-10)


@EVERY
def test_no_logit_depends_on_a_later_token_and_all_depend_on_the_source(kind):
    model, (source, _), tokens = build(kind), sources(), torch.randint(23, (3, 8))
    changed, other = tokens.clone(), source.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 23
    other[:, :3] = (other[:, :3] + 1) % 23
    before, after, elsewhere = model(tokens, source), model(changed, source), model(tokens, other)
    assert torch.allclose(before[:, :5], after[:, :5], rtol=0, atol=1e-12)
    assert not torch.isclose(before[:, 5:], after[:, 5:]).all(-1).any()
    assert not torch.isclose(before[:, 0], elsewhere[:, 0]).all(-1).any()


@EVERY
def test_steps_of_many_requests_give_what_the_whole_sequences_give(kind):
    model, (source, key_padding_mask) = build(kind), sources()
    prompts, plan = torch.randint(23, (3, 9)), [[4, 3, 0, 1, 1], [0, 2, 1, 1, 0], [9, 0, 0, 0, 0]]
    store = DictionaryStore(model.state_specs())
    for request, length in enumerate(key_padding_mask.sum(-1)):
        store.admit(request)
        with torch.no_grad():
            store.write_source(request, model.encode(source[request, :length]))
    done, found = [0, 0, 0], [[], [], []]
    for counts in zip(*plan, strict=True):
        rows = [r for r in range(3) if counts[r]]
        batch = RaggedBatch.of([counts[r] for r in rows], [done[r] for r in rows], torch.tensor)
        tokens = torch.cat([prompts[r, done[r] : done[r] + counts[r]] for r in rows])
        with torch.no_grad():
            logits = model.logits(model.step(tokens, batch, store.view(batch, rows)))
        for span in batch.spans():
            found[rows[span.request]].append(logits[span.start : span.stop])
        done = [before + count for before, count in zip(done, counts, strict=True)]
    whole = model(prompts, source, key_padding_mask)
    for request in range(3):
        stepped, expected = torch.cat(found[request]), whole[request, : done[request]]
        torch.testing.assert_close(stepped, expected, rtol=0, atol=rounding(model.state_specs().values()))


@pytest.mark.parametrize("kind", ["rnnsearch-coverage", "transformer-coverage"])
def test_what_a_cross_attention_remembers_beside_the_source_is_trained_through(kind):
    model, (source, key_padding_mask), tokens = build(kind).train(), sources(), torch.randint(23, (3, 6))
    model(tokens, source, key_padding_mask)[:, -1].square().sum().backward()
    weights = [weight for name, weight in model.named_parameters() if name.endswith("of_coverage")]
    assert weights
    assert all(weight.grad.abs().max() > 1e-6 for weight in weights)


def test_a_cross_attention_with_rows_of_its_own_tokens_does_not_step_through_a_recurrent_decoder(monkeypatch):
    coverage = installed().mechanisms.get("coverage")
    states = type(coverage).state
    rows = {"rows": Paged({"x": Field((8,))})}
    monkeypatch.setattr(type(coverage), "state", lambda self, config: {**states(self, config), **rows})
    with pytest.raises(Incompatible, match="token by token here, which does not work with its Paged state 'rows'"):
        build("rnnsearch-coverage")


@EVERY
def test_a_folder_gives_the_model_back(kind, tmp_path):
    model, (source, key_padding_mask), tokens = build(kind), sources(), torch.randint(23, (3, 5))
    loaded = load_model(save_model(tmp_path / "model", model), "float64")
    require_same_model(loaded.model, model, tokens, source, key_padding_mask)
    assert loaded.family == MODELS[kind][0]
    assert loaded.max_encoder_len == 12
    assert len(loaded.mechanisms) == {"bottleneck": 0, "transformer": 4, "t5": 4}.get(loaded.family, 1)


@EVERY
def test_maps_are_the_weights_that_were_used(kind):
    model, (source, _), tokens = build(kind), sources(), torch.randint(23, (5,))
    if MODELS[kind][0] == "bottleneck":
        with pytest.raises(Incompatible, match="no attention weights"):
            model.attention_maps(tokens, [0], source[0])
        return
    maps = model.attention_maps(tokens, [0], source[0])[0]
    assert maps.shape[1:] == (5, 9)
    if "local_p" not in kind:
        reached = maps.sum(-1)
        torch.testing.assert_close(reached, torch.ones_like(reached))
    with pytest.raises(InvalidValue, match="layers"):
        model.attention_maps(tokens, [7], source[0])


def test_a_recurrent_model_remembers_fixed_bytes_whatever_it_has_written():
    specs = build("rnnsearch").state_specs()
    assert not any(isinstance(spec, Paged) for states in specs.values() for spec in states.values())
    assert isinstance(specs["recurrence"]["state"], Slot)
    # A state of 8 numbers and where it began; 16 for key and 16 for value a source token.
    weigh = sum(state_bytes(states, tokens=500, source=7, dtype="float32") for states in specs.values())
    assert weigh == 4 * (8 + 8 + 7 * 32)


@pytest.mark.parametrize("kind", ["rnnsearch", "transformer"])
def test_bad_sources_are_named(kind):
    model, tokens = build(kind), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(InvalidValue, match="source"):
        model(tokens)
    with pytest.raises(InvalidValue, match=r"'13 tokens'.*at most 12"):
        model(tokens, torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(InvalidValue, match="21 tokens"):
        model(torch.zeros(1, 21, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))
    for key_padding_mask in ([False, True, True], [False, False, False]):
        with pytest.raises(InvalidValue, match="padding at the end"):
            model(tokens, torch.zeros(1, 3, dtype=torch.int64), torch.tensor([key_padding_mask]))


@pytest.mark.parametrize(
    ("kind", "values", "error", "said"),
    [
        ("rnnsearch", {"mechanism": "linear"}, Incompatible, "is not cross.*alignment"),
        ("rnnsearch", {"mechanism": "alinment"}, UnknownName, "alignment"),
        ("rnnsearch", {"options": {"hiden": 3}}, UnknownName, "intermediate_size"),
        ("rnnsearch", {"max_out": 3}, UnknownName, "maxout"),
        ("luong", {"num_layers": 0}, InvalidValue, "num_layers: 0"),
        ("luong", {"reverse_source": "yes"}, InvalidValue, "reverse_source"),
        ("bottleneck", {"dropout": 1.0}, InvalidValue, "dropout"),
        ("transformer", {"num_heads": 3}, InvalidValue, "divisor"),
        ("transformer", {"norm_place": "mid"}, InvalidValue, "norm_place"),
        ("transformer", {"encoder": "alignment"}, Incompatible, "is not bidirectional"),
        ("transformer", {"encoder": "retnet"}, Incompatible, "bidirectional"),
        ("transformer", {"decoder": "alignment"}, Incompatible, "causal"),
        ("transformer", {"cross": "rope"}, Incompatible, "is not cross.*mha"),
        ("transformer", {"cross_options": {"cross": False}}, InvalidValue, "cross: False .*place in the model"),
        ("transformer", {"encoder_options": {"cross": True}}, InvalidValue, "cross: True .*place in the model"),
    ],
)
def test_configs_that_do_not_fit_are_named(kind, values, error, said):
    name, good = MODELS[kind]
    with pytest.raises(error, match=said):
        installed().models.get(name).configure(good | values)


def test_a_missing_field_is_named():
    with pytest.raises(InvalidValue, match="maxout"):
        installed().models.get("rnnsearch").configure(RECURRENT)


def test_a_config_that_the_file_cannot_fill_is_refused_before_it_takes_memory(tmp_path):
    folder = save_model(tmp_path / "model", build("rnnsearch"))
    (folder / "manifest.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    for change, said in (
        ({"model": config["model"] | {"vocab_size": 10**9}}, "vocab_size: 1000000000"),
        ({"model": config["model"] | {"maxout": 6}}, "readout.weight"),
        ({"model": 7}, "model"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointInvalid, match=said):
            load_model(folder)
