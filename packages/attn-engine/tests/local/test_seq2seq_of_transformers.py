"""Encoder-decoders as transformers writes them: the engine's tokens, greedy and by beam search, are `generate`'s."""

from __future__ import annotations

import json

import pytest
import torch
from attn_engine import LocalClient
from attn_schema import Prompt, SamplingParams

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.oracle

SIZES = {
    "vocab_size": 31,
    "d_model": 32,
    "max_position_embeddings": 40,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id"), 2),
    "bos_token_id": 0,
    "pad_token_id": 1,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 31,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
    "pad_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "bart": SIZES,
    "mbart": SIZES,
    "marian": SIZES | {"decoder_start_token_id": 1, "scale_embedding": True, "activation_function": "swish"},
    "pegasus": SIZES | {"decoder_start_token_id": 1},
    "m2m_100": SIZES,
    "blenderbot": SIZES,
    "umt5": T5,
}
FORCED = {"bart": 0, "mbart": 7, "m2m_100": 7}
"""The token that follows the start."""
TEXTS = ["w5 w9 w12 w20 w3", "w4", "w30 w29 w28 w3 w3 w3 w17 w6"]


def saved(family, folder):
    """A random model of transformers, which writes its folder, and the same of a tokenizer of numbered words."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    peer = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            wide = 2.0 if "positions" in name else 0.4 if "shared" in name else 0.9
            parameter.normal_(mean=float("norm" in name.lower() and "weight" in name), std=wide)
    peer.generation_config.forced_bos_token_id = FORCED.get(family)
    peer.save_pretrained(folder)
    words = ["<s>", "<pad>", "</s>", *(f"w{place}" for place in range(3, 31))]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("<s>", 0), ("</s>", 2)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.add_special_tokens(words[:3])
    backend.save(str(folder / "tokenizer.json"))
    spelled = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(spelled))
    return type(peer).from_pretrained(folder, attn_implementation="eager").eval(), backend


@pytest.mark.parametrize("family", FAMILIES)
def test_translations_are_those_of_generate(family, tmp_path):
    transformers.logging.disable_progress_bar()
    peer, backend = saved(family, tmp_path / "models" / "peer")
    begin = [FAMILIES[family]["decoder_start_token_id"], *([FORCED[family]] if family in FORCED else [])]
    seen = set()
    with LocalClient(tmp_path) as client:
        for text in TEXTS:
            ids = torch.tensor([backend.encode(text).ids])
            for beams in (1, 3):
                options = {} if beams == 1 else {"num_beams": beams, "length_penalty": 0.0}
                theirs = peer.generate(ids, max_new_tokens=12, do_sample=False, **options)[0].tolist()
                # A forced token is part of the prompt here.
                assert theirs[: len(begin)] == begin
                params = SamplingParams(max_new_tokens=13 - len(begin), **options)
                deltas = list(client.generate("peer", Prompt.of("", encoder_prompt=text), params))
                found = [token.id for delta in deltas for token in delta.tokens]
                wanted = theirs[len(begin) :]
                assert [token for token in found if token != 2] == [token for token in wanted if token != 2], beams
                seen |= set(found)
    assert len(seen) > 1
