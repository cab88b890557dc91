"""A family that a plugin offers is found, built, saved, quantised and missed by name, as those of this package are."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from attn_core import configure, installed
from attn_core.errors import AmbiguousName, CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_core.plugins.registry import Registry
from attn_models.adapters.base import StateDictAdapter, StoredTensor, needed
from attn_models.adapters.llama import LlamaAdapter
from attn_models.adapters.registry import decoder_adapter, missing_packages, our_adapters
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.sources import convert
from attn_models.weights.checkpoint_folder import write_folder
from attn_schema.schema import PlainConfig
from safetensors.torch import load_file
from torch import nn

STRANGER = "attn-testing"
SIZES = {"vocab_size": 32, "hidden_size": 32, "max_seq_len": 24}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneLayerConfig(PlainConfig):
    vocab_size: int
    hidden_size: int
    max_seq_len: int


class OneLayer(nn.Module):
    """A model that shares nothing with ours: one attention, and an unembedding that is the embedding."""

    def __init__(self, config):
        super().__init__()
        self.config, self.vocab_size, self.max_seq_len = config, config.vocab_size, config.max_seq_len
        mechanism = installed().mechanisms.get("attn-variants/mha")
        own = configure(mechanism, hidden_size=config.hidden_size, num_heads=4, causal=True)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention, self.states = mechanism.build(own), mechanism.state(own)
        self.unembedding = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.unembedding.weight = self.words.weight
        self.register_buffer("places", torch.arange(config.max_seq_len), persistent=False)

    def forward(self, tokens):
        hidden = self.words(tokens)
        return self.logits(hidden + self.attention(hidden) + self.places[: tokens.shape[1], None])

    def step(self, tokens, batch, state):
        hidden = self.words(tokens)
        return hidden + self.attention.step(hidden, batch, state["only"]) + self.places[batch.positions][:, None]

    def logits(self, hidden):
        return self.unembedding(hidden)

    def state_specs(self):
        return {"only": self.states}

    def layer_mechanisms(self):
        return {"only": "mha"}


class OneLayerAdapter(StateDictAdapter):
    model_type = "one_layer"
    known_keys = frozenset({"vocab_size", "hidden_size", "context"})
    Config = OneLayerConfig
    head, embedding = "lm_head.weight", "words.weight"

    def build(self, config):
        return OneLayer(config)

    def from_hf_config(self, values):
        return OneLayerConfig(
            vocab_size=needed(values, "vocab_size"),
            hidden_size=needed(values, "hidden_size"),
            max_seq_len=needed(values, "context"),
        )

    def keys_of(self, config):
        sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "context": config.max_seq_len}
        return {"model_type": self.model_type, **sizes}

    def tensor_mappings(self, parameters):
        return [
            StoredTensor(name.replace("words", "wte").replace("attention.", "attn."), (name,)) for name in parameters
        ]


@pytest.fixture
def plugin():
    """The family as if the distribution attn-testing, which is installed, offered it."""
    registry = installed().adapters
    registry.register(OneLayerAdapter(), STRANGER)
    yield
    del registry._items[f"{STRANGER}/one_layer"]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return OneLayer(OneLayerConfig(**SIZES)).eval()


def test_a_saved_folder_names_the_package_and_gives_the_same_logits(plugin, model, tmp_path, stepwise):
    folder = save_model(tmp_path / "model", model)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "one_layer"
    assert set(config["requires"]) == {"attn-models", STRANGER}
    read = load_model(folder)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(read.model(tokens), model(tokens))
    read.model.embedding = read.model.words  # where the fixture looks for the type
    (stepped,) = stepwise(read.model, [tokens[0].tolist()], [[2, 1, 2]])
    torch.testing.assert_close(stepped, model(tokens)[0], rtol=1e-5, atol=1e-5)
    assert (read.family, read.mechanisms) == ("one_layer", ("mha",))


def test_a_shared_weight_is_stored_once_and_shared_again_when_it_is_read(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    stored = load_file(folder / "model.safetensors")
    assert "wte.weight" in stored
    assert not {"lm_head.weight", "unembedding.weight"} & stored.keys()
    read = load_model(folder).model
    assert read.unembedding.weight is read.words.weight
    assert sum(weight.numel() for weight in read.parameters()) == sum(weight.numel() for weight in model.parameters())


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    write_folder(tmp_path / "same", config, tensors | {"lm_head.weight": tensors["wte.weight"].clone()})
    assert torch.equal(load_model(tmp_path / "same").model.words.weight, model.words.weight)
    write_folder(tmp_path / "other", config, tensors | {"lm_head.weight": tensors["wte.weight"] + 1})
    with pytest.raises(CheckpointInvalid, match=r"lm_head\.weight"):
        load_model(tmp_path / "other")


def test_a_shared_weight_is_quantised_where_it_multiplies_and_looked_up_as_it_is(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    packed = load_model(folder, quantization="int8").model
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert packed.quantization == "int8"
    assert torch.equal(packed.words.weight, model.words.weight)
    with torch.no_grad():
        apart = (packed(tokens) - model(tokens)).abs().max() / model(tokens).abs().max()
    assert 0 < apart < 0.03


def test_converting_finds_the_family_and_writes_which_package_reads_the_folder(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    config = json.loads((folder / "config.json").read_text())
    del config["requires"]  # as its authors would publish it
    write_folder(tmp_path / "published", config, load_file(folder / "model.safetensors"))
    converted = convert(tmp_path / "published", tmp_path / "converted", "float32")
    assert STRANGER in json.loads((converted / "config.json").read_text())["requires"]
    tokens = torch.tensor([[3, 1, 4]])
    assert torch.equal(load_model(converted).model(tokens), model(tokens))


def test_without_the_package_the_error_says_what_to_install(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    (folder / "manifest.json").unlink()
    path = folder / "config.json"
    config = json.loads(path.read_text())
    needed_packages = {"attn-models": "0.1.0", "attn-one-layer": "2.3"}
    path.write_text(json.dumps(config | {"model_type": "one_more_layer", "requires": needed_packages}))
    for read in (load_model, lambda place: convert(place, tmp_path / "converted")):
        with pytest.raises(UnknownName, match=r"made with attn-one-layer 2\.3; pip install attn-one-layer$"):
            read(folder)


@pytest.mark.parametrize("name", ["x; rm -rf ~", "--index-url=http://evil", "../x", "a b", ""])
def test_words_that_are_no_package_are_never_shown_as_something_to_install(name):
    assert missing_packages({name: "1.0"}) == {}
    assert missing_packages({"no-such-package": name}) == {}
    assert missing_packages({"no-such-package": "1.0"}) == {"no-such-package": "1.0"}


@pytest.mark.parametrize("given", [None, "attn-x", ["attn-x"], {"attn-x": 1}])
def test_a_list_of_packages_that_is_none_changes_nothing(given):
    assert missing_packages(given) == {}


class Impostor(LlamaAdapter):
    def from_hf_config(self, values):
        raise AssertionError("a plugin's layout is used in place of Llama's")


def test_no_plugin_replaces_a_family_of_ours():
    registry = Registry("model_type", guarded="attn-models")
    for adapter in our_adapters():
        registry.register(adapter, "attn-models")
    with pytest.raises(InvalidValue, match="model_type of acme-llama: 'llama' is not allowed; allowed: a name that"):
        registry.register(Impostor(), "acme-llama")
    assert type(registry.get("llama")) is LlamaAdapter


def test_two_plugins_with_one_name_are_refused_by_both_names(plugin, model, tmp_path):
    folder = save_model(tmp_path / "model", model)
    registry = installed().adapters
    registry.register(OneLayerAdapter(), "acme-layers")
    try:
        with pytest.raises(AmbiguousName, match="acme-layers/one_layer, attn-testing/one_layer"):
            load_model(folder)
    finally:
        del registry._items["acme-layers/one_layer"]


def test_every_layout_of_ours_comes_through_the_hook():
    registry = installed().adapters
    assert {registry.name_of(adapter) for adapter in our_adapters()} <= {f"attn-models/{a.name}" for a in registry}
    assert type(decoder_adapter("llama")) is LlamaAdapter
    assert {"llama", "gemma3"} <= {found.name for found in installed().gguf_architectures}


class Unusual(Decoder):
    """Of another class, but with the config of a plain decoder, of which its folder would be read."""


def test_a_decoder_of_another_class_needs_a_config_of_its_own(tiny, tmp_path):
    with pytest.raises(Incompatible, match="Unusual with a DecoderConfig cannot be saved"):
        save_model(tmp_path / "model", Unusual(tiny()))


def test_a_model_of_nobody_cannot_be_saved(model, tmp_path):
    with pytest.raises(Incompatible, match=r"attn_models.*attn_adapters"):
        save_model(tmp_path / "model", model)
