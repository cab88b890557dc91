"""Encoder-decoders of transformers, served: tokens are those of transformers' own generation, greedy and by beams."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from attn_engine import Request, build_engine
from attn_host.tokenization import PromptTokenizer
from attn_models.loading import load_model
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_schema import EncoderPrompt, Prompt, SamplingParams

pytestmark = pytest.mark.oracle
WORDS = ["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrst"]
TEXTS = ["a b c d e", "t", "q r s a b i j k l m n o p", "h h h h"]
END = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}


def word_tokenizer() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    backend.add_special_tokens(WORDS[:3])
    return Tokenizer(backend, TokenizerSettings(eos_token="</s>", pad_token="<pad>", unk_token="<unk>"))


@pytest.fixture(scope="module", params=["t5", "mt5"])
def peer(request, tmp_path_factory):
    """A model of transformers and its folder, whose generations are long and differ."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": 23, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = transformers.AutoConfig.for_model(request.param, **sizes, **END)
    torch.manual_seed(3)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.4)
    model.save_pretrained(folder)
    for name, content in word_tokenizer().files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return model, folder


def written(engine):
    """The tokens of every request, by its id."""
    found = {}
    while not engine.idle:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(token.id for token in output.delta.tokens)
    return found


@pytest.mark.parametrize("num_beams", [1, 4])
def test_generations_are_those_of_transformers(peer, num_beams):
    model, folder = peer
    loaded = load_model(folder)
    prompts = PromptTokenizer(loaded.tokenizer)
    params = SamplingParams(temperature=0, max_new_tokens=12, num_beams=num_beams)
    engine = build_engine(loaded.model, loaded.tokenizer)
    encoding = pytest.importorskip("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        prompt = Prompt(text="", encoder_prompt=EncoderPrompt(text=text))
        request = Request(
            id=text, token_ids=prompts.ids(prompt), encoder_token_ids=prompts.encoder_ids(prompt), params=params
        )
        assert list(request.encoder_token_ids) == encoding(text)["input_ids"]
        engine.submit(request)
    ours = written(engine)
    assert len({tuple(ids) for ids in ours.values()}) == len(TEXTS)
    for text in TEXTS:
        ids = torch.tensor([encoding(text)["input_ids"]])
        theirs = model.generate(ids, max_new_tokens=12, num_beams=num_beams, do_sample=False)[0, 1:].tolist()
        assert [token for token in ours[text] if token != 1] == [token for token in theirs if token > 1 or token == 0]
