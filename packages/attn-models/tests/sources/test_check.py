"""What is said of a model before it is loaded is what loading it finds."""

from __future__ import annotations

import json
import re

import pytest
from attn_core.errors import UnknownName
from attn_models.decoder.decoder import Decoder
from attn_models.loading import load_model, save_model
from attn_models.sources import ModelStore
from attn_models.sources.check import memory_rate
from attn_models.tokenizers import character_tokenizer
from attn_schema.decoder import DecoderConfig

SIZES = {"vocab_size": 12, "max_seq_len": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
LLAMA = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary", "bias": False, "tie_word_embeddings": False}


@pytest.fixture
def store(tmp_path):
    return ModelStore(tmp_path / "home")


@pytest.fixture
def folder(tmp_path):
    model = Decoder(DecoderConfig(**SIZES, **LLAMA))
    return save_model(tmp_path / "model", model, character_tokenizer("abc"), layout="llama")


def change(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (folder / "manifest.json").unlink(missing_ok=True)
    return folder


def test_a_model_is_described_as_it_loads(store, folder, tiny_llama):
    for place in (folder, tiny_llama.path):
        found, loaded = store.check(str(place)), load_model(place)
        assert found.refused is None
        assert (found.family, found.parameters) == ("llama", loaded.parameters)
        assert found.max_seq_len == loaded.model.max_seq_len
        assert found.weight_bytes == 4 * loaded.parameters == found.read_bytes
        config = loaded.config
        width = config.hidden_size * (config.num_kv_heads or config.num_heads) // config.num_heads
        assert found.cache_bytes == 1024 * config.num_layers * 2 * width * 2
        assert f"{loaded.tokenizer.vocab_size:,} tokens" in found.rows()["tokenizer"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"intermediate_size": 7}, r"shape .* its model needs"),
        ({"model_type": "llamma"}, r"'llamma'; names like it: llama.*model-families"),
        ({"hidden_act": "sine"}, "hidden_act"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method"),
        ({"num_hidden_layers": 3}, "is missing"),
    ],
)
def test_what_would_not_load_is_said_with_the_words_of_loading(store, folder, values, said):
    found = store.check(str(change(folder, **values)))
    with pytest.raises(Exception, match=said) as refused:
        load_model(folder)
    assert re.search(said, found.refused)
    assert found.refused.partition(";")[0] == refused.value.message.partition(";")[0]
    assert found.rows()["loads"].startswith("no: ")


def test_no_weight_is_read(store, folder):
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-64:] = b"\xff" * 64  # NaN, which loading refuses
    weights.write_bytes(content)
    assert store.check(str(folder)).refused is None


def test_a_name_that_is_nothing_is_an_error_of_the_caller(store):
    with pytest.raises(UnknownName):
        store.check("no-such-model")


def test_the_rate_of_memory_is_measured():
    assert 1e8 < memory_rate() < 1e13
