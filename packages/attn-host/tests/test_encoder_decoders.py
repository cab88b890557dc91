"""Encoder-decoders of transformers, served: tokens are those of transformers' own generation, greedy and by beams."""

from __future__ import annotations

import json
import wave

import pytest
import tokenizers
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_engine import Request, build_engine
from attn_host.tokenization import PromptTokenizer
from attn_host.transcription import Transcriber
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


HEARD = {
    "lang_to_id": {"<|en|>": 3, "<|de|>": 4, "<|fr|>": 5},
    "task_to_id": {"transcribe": 6, "translate": 7},
    "no_timestamps_token_id": 8,
    "is_multilingual": True,
    "suppress_tokens": [9, 11],
    "begin_suppress_tokens": [12, 1],
    "max_length": 20,
    "return_timestamps": False,
} | END


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A Whisper of transformers that hears a second, and its folder."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("whisper")
    heads = {f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")}
    layers = {f"{stack}_layers": 2 for stack in ("encoder", "decoder")}
    inner = {f"{stack}_ffn_dim": 48 for stack in ("encoder", "decoder")}
    sizes = {"vocab_size": 23, "d_model": 32, "max_source_positions": 50, "max_target_positions": 20}
    config = transformers.WhisperConfig(**sizes, **heads, **layers, **inner, bos_token_id=0, **END)
    torch.manual_seed(3)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.4)
    model.generation_config = transformers.GenerationConfig(**HEARD)
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    for name, content in word_tokenizer().files().items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return model, folder


def their_tokens(model, heard, begin):
    """The likeliest token of transformers after each, from those that a text begins with; none that is suppressed."""
    ids = list(begin)
    while len(ids) < 20:
        logits = model(heard, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        logits[HEARD["suppress_tokens"]] = -torch.inf
        if len(ids) == len(begin):
            logits[HEARD["begin_suppress_tokens"]] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] == END["eos_token_id"]:
            return ids[len(begin) : -1]
    return ids[len(begin) :]


@pytest.mark.parametrize(("language", "task"), [("en", "transcribe"), ("de", "translate"), (None, "transcribe")])
@torch.no_grad()
def test_transcriptions_are_those_of_transformers(whisper, language, task, tmp_path):
    model, folder = whisper
    transcriber = Transcriber(folder)
    reader = pytest.importorskip("transformers").WhisperFeatureExtractor.from_pretrained(folder)
    texts = set()
    for seed in range(3):
        torch.manual_seed(seed)
        loud = (torch.randn(12000) * 3000 * (seed + 1)).clamp(-32000, 32000).to(torch.int16)
        with wave.open(str(tmp_path / "talk.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(loud.numpy().tobytes())
        heard = reader((loud / 32768).numpy(), sampling_rate=16000, return_tensors="pt")["input_features"]
        frames = transcriber.reader(loud / 32768)
        torch.testing.assert_close(frames, heard[0].T, rtol=0, atol=1e-5)
        guessed = f"<|{language or transcriber.language(frames)}|>"
        if language is None:
            assert HEARD["lang_to_id"][guessed] == int(model.detect_language(heard)[0])
        begin = (0, HEARD["lang_to_id"][guessed], HEARD["task_to_id"][task], HEARD["no_timestamps_token_id"])
        theirs = their_tokens(model, heard, begin)
        assert transcriber.tokens(frames, begin) == theirs
        ours = transcriber.transcribe(tmp_path / "talk.wav", language=language, task=task)
        assert ours == transcriber.tokenizer.decode(theirs).strip()
        texts.add(ours)
    assert len(texts) > 1


def test_what_a_whisper_does_not_know_is_refused(whisper, peer):
    _, folder = whisper
    transcriber = Transcriber(folder)
    with pytest.raises(InvalidValue, match=r"language.*de, en, fr"):
        transcriber.prompt.tokens("xx", "transcribe")
    with pytest.raises(InvalidValue, match="task"):
        transcriber.prompt.tokens("en", "sing")
    with pytest.raises(Incompatible, match="hears no audio"):
        Transcriber(peer[1])
    engine = build_engine(transcriber.model, transcriber.tokenizer)
    with pytest.raises(InvalidValue, match="encoder_features"):
        engine.submit(Request(id="text", token_ids=(0,), encoder_token_ids=(1, 2)))


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
