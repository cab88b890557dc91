"""What the files of a model say beside its weights stays as it is when the model is changed and saved."""

from __future__ import annotations

import json

import pytest
import torch
from attn_models.loading import load_model, save_model
from attn_models.tokenizers import character_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 5]}
NOTES = {"initializer_range": 0.05, "made_by": {"whom": "a test"}}
LLAMA = {"norm": "rms", "feed_forward": "swiglu", "positions": "rotary"}
CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "phi3": transformers.Phi3Config,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "olmo2": transformers.Olmo2Config,
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_field_of_a_base_is_kept_and_transformers_stops_where_it_did(kind, tmp_path):
    torch.manual_seed(0)
    peer = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**SIZES | IDS | NOTES))
    base, target = tmp_path / "base", tmp_path / "target"
    peer.save_pretrained(base)
    (base / "generation_config.json").unlink()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer("abc.").backend,
        eos_token=".",
        model_max_length=63,
        padding_side="left",
        chat_template="{{ messages }}",
        extra_special_tokens={"image_token": "b"},
    )
    tokenizer.save_pretrained(base)
    loaded = load_model(base, "float32")
    save_model(target, loaded.model, loaded.tokenizer, layout=kind, base=loaded)
    for name in ("config.json", "tokenizer_config.json"):
        before, after = (json.loads((folder / name).read_text()) for folder in (base, target))
        assert {key: after.get(key) for key in before if key != "dtype"} == {
            key: value for key, value in before.items() if key != "dtype"
        }
    assert (target / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()
    again = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert again.generation_config.eos_token_id == peer.generation_config.eos_token_id == [2, 5]
    assert load_model(target).tokenizer.end_ids == loaded.tokenizer.end_ids
    asked = torch.arange(8)[None]
    torch.testing.assert_close(again(asked).logits, peer(asked).logits)


def test_a_model_of_a_tokenizer_with_several_ends_stops_at_each_in_transformers(tiny, tmp_path):
    from attn_models.decoder.decoder import Decoder
    from attn_models.tokenizers import Tokenizer
    from attn_models.tokenizers.settings import TokenizerSettings

    settings = TokenizerSettings(eos_token=".", bos_token="a", eos_ids=(1,))
    tokenizer = Tokenizer(character_tokenizer("abc.").backend, settings)
    save_model(tmp_path, Decoder(tiny(mechanism="mha", **LLAMA)), tokenizer, layout="llama")
    said = transformers.AutoConfig.from_pretrained(tmp_path)
    assert set(said.eos_token_id) == tokenizer.end_ids
    assert said.bos_token_id == tokenizer.bos_id
