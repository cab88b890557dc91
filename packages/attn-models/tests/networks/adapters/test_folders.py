"""Models in folders: what was saved comes back bit for bit, and what does not fit is named."""

from __future__ import annotations

import json
import pickle
from importlib.metadata import version

import pytest
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue, UnknownName
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer
from attn_testing.checkpoints import require_same_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import nn

pytestmark = pytest.mark.usefixtures("strangers")

SHAPES = [
    {},
    {"mechanism": "gqa", "num_kv_heads": 2, "norm": "rms", "feed_forward": "swiglu", "positions": "rotary"},
    {"norm_place": "post", "tie_word_embeddings": False, "bias": True, "dropout": 0.1},
    {"pattern": [{"mechanism": "running_mean", "options": {"decay": 0.9}}, "mha"]},
    {"mechanism": "linear", "positions": "none"},
    {"mechanism": "additive"},
]


@pytest.fixture
def saved(tiny, tmp_path):
    """A folder with a saved decoder, its manifest taken away so that a test may change a file."""
    save_model(tmp_path / "model", Decoder(tiny()))
    (tmp_path / "model" / "manifest.json").unlink()
    return tmp_path / "model"


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("fields", SHAPES, ids=lambda fields: "-".join(map(str, fields.values())) or "default")
def test_a_model_trained_saved_and_loaded_has_the_same_parameters_and_logits(fields, tiny, tmp_path):
    torch.manual_seed(0)
    model = Decoder(tiny(**fields))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(31, (4, 16))
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    save_model(tmp_path / "model", model)
    loaded = load_model(tmp_path / "model")
    require_same_model(loaded.model, model, tokens)
    assert not loaded.model.training
    assert {name: p.requires_grad for name, p in loaded.model.named_parameters()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }


def test_a_folder_says_what_must_be_installed_to_build_its_model(tiny, tmp_path):
    config = tiny(pattern=["mha", {"mechanism": "sliding_window", "options": {"window": 4}}])
    save_model(tmp_path / "model", Decoder(config))
    said = json.loads((tmp_path / "model" / "config.json").read_text())
    assert said["model_type"] == "attn_decoder"
    assert said["requires"] == {name: version(name) for name in ("attn-core", "attn-models", "attn-variants")}
    assert said["decoder"]["pattern"][1] == {"mechanism": "attn-variants/sliding_window", "options": {"window": 4}}


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tiny, tmp_path):
    save_model(tmp_path / "model", Decoder(tiny(vocab_size=5)), character_tokenizer("abcdef"))
    with pytest.raises(CheckpointInvalid, match="6 tokens, but the embedding only 5 rows"):
        load_model(tmp_path / "model")


def test_added_tokens_without_a_row_are_left_out(tiny, tmp_path):
    """As of text models of Gemma 3, whose tokenizer has the token of the images that others of the family read."""
    tokenizer = character_tokenizer("abc<>")
    tokenizer.backend.add_tokens([AddedToken("<b>", special=True), AddedToken("<a>", special=True)])
    save_model(tmp_path / "model", Decoder(tiny(vocab_size=6)), tokenizer)
    loaded = load_model(tmp_path / "model").tokenizer
    assert loaded.vocab_size == 6
    assert loaded.encode("<a><b>") == [*character_tokenizer("abc<>").encode("<a>"), 5]
    assert "'<a>'" in loaded.remarks[-1]


def test_code_that_a_folder_asks_for_is_not_run_and_that_is_said(saved, caplog):
    (saved / "modeling.py").write_text("raise SystemExit('ran')")
    change_config(saved, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    load_model(saved)
    assert "auto_map" in caplog.text


def test_tokenizer_and_generation_settings_travel_with_the_model(tiny, tmp_path):
    tokenizer = character_tokenizer("to be, or not")
    save_model(tmp_path / "model", Decoder(tiny()), tokenizer, generation={"temperature": 0.5})
    loaded = load_model(tmp_path / "model")
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("not to be") == tokenizer.encode("not to be")
    assert loaded.generation == {"temperature": 0.5}


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "fp16"])
def test_weights_are_loaded_in_the_type_asked_for(dtype, saved):
    full, loaded = load_model(saved).model, load_model(saved, dtype).model
    kinds = {parameter.dtype for parameter in loaded.parameters()}
    assert kinds == {{"float64": torch.float64, "bfloat16": torch.bfloat16, "fp16": torch.float16}[dtype]}
    torch.testing.assert_close(loaded.embedding.weight.float(), full.embedding.weight, rtol=0.01, atol=1e-4)


def test_a_type_that_is_no_float_is_refused(saved):
    with pytest.raises(InvalidValue, match="dtype: 'int8'"):
        load_model(saved, "int8")


def test_every_missing_extra_and_misshaped_tensor_is_named(saved):
    tensors = load_file(saved / "model.safetensors")
    del tensors["blocks.0.attention.query.weight"]
    del tensors["norm.weight"]
    tensors["blocks.1.attention.extra.weight"] = torch.zeros(2)
    tensors["blocks.1.feed_forward.up.weight"] = torch.zeros(64, 17)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(CheckpointInvalid) as caught:
        load_model(saved)
    said = str(caught.value)
    assert "'blocks.0.attention.query.weight' is missing" in said
    assert "'norm.weight' is missing" in said
    assert "'blocks.1.attention.extra.weight' is unexpected" in said
    assert "'blocks.1.feed_forward.up.weight' has shape [64, 17]; its model needs [64, 16]" in said


def test_a_mechanism_that_is_not_installed_is_named_with_its_package(saved):
    said = json.loads((saved / "config.json").read_text())
    said["decoder"]["mechanism"] = "attn-wonder/wonder"
    change_config(saved, decoder=said["decoder"], requires={"attn-wonder": "2.1"})
    with pytest.raises(UnknownName, match=r"'wonder'.*attn-wonder 2\.1; pip install attn-wonder"):
        load_model(saved)


def test_a_mechanism_that_its_package_does_not_have_any_more_is_named(saved):
    said = json.loads((saved / "config.json").read_text())
    change_config(saved, decoder=said["decoder"] | {"mechanism": "attn-variants/gone"})
    with pytest.raises(UnknownName, match="gone"):
        load_model(saved)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 10**9),
        ("vocab_size", 10**15),
        ("hidden_size", 2**62),
        ("num_heads", 2**40),
        ("intermediate_size", 10**12),
        ("num_layers", -1),
    ],
)
def test_a_config_larger_than_its_tensors_is_refused_before_anything_is_built(field, value, saved):
    said = json.loads((saved / "config.json").read_text())
    change_config(saved, decoder=said["decoder"] | {field: value, "head_dim": 4})
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        load_model(saved)


def test_a_config_of_the_wrong_form_is_named(saved):
    change_config(saved, decoder=[1, 2])
    with pytest.raises(CheckpointInvalid, match=r"config\.json: decoder"):
        load_model(saved)


def test_a_pickle_under_the_name_of_weights_is_refused_and_not_run(saved):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    (saved / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointInvalid, match="pickle"):
        load_model(saved)


def test_a_truncated_file_is_refused_with_its_path(saved):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointInvalid, match=r"model\.safetensors"):
        load_model(saved)


def test_a_changed_weight_is_refused_by_the_manifest(tiny, tmp_path):
    save_model(tmp_path / "model", Decoder(tiny()))
    path = tmp_path / "model" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointInvalid, match="SHA-256"):
        load_model(tmp_path / "model")


def test_a_model_with_weights_that_are_not_finite_is_not_saved(tiny, tmp_path):
    model = Decoder(tiny())
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(InvalidValue, match=r"norm\.weight"):
        save_model(tmp_path / "model", model)
    assert not (tmp_path / "model").exists()
