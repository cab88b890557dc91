"""Encoder-decoders of transformers, served: tokens are those of transformers' own generation, greedy and by beams."""

from __future__ import annotations

import json
import shutil
import wave

import pytest
import tokenizers
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_engine import Request, build_engine
from attn_engine.host.tokenization import PromptTokenizer
from attn_engine.host.transcription import DISABLING_VALUES, Transcriber
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
    "no_timestamps_token_id": 18,
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


def copied(folder, target, said, config=()):
    """The folder with another generation_config.json, and other keys in its config.json."""
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps(said))
    values = json.loads((target / "config.json").read_text()) | dict(config)
    (target / "config.json").write_text(json.dumps(values))
    return target


def some_audio(seed):
    """Three quarters of a second, 16000 samples each."""
    torch.manual_seed(seed)
    return (torch.randn(12000) * 3000 * (seed + 1)).clamp(-32000, 32000).to(torch.int16)


def write_wav(path, samples):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(samples.numpy().tobytes())
    return path


WITHOUT_LANGUAGES = {"lang_to_id": None, "task_to_id": None, "is_multilingual": False}
ASKED = [
    ({}, {}, {}),
    ({}, {}, {"task": "transcribe"}),
    ({}, {}, {"task": "translate"}),
    ({}, {}, {"language": "de"}),
    ({}, {}, {"language": "fr", "task": "translate"}),
    ({"language": "de"}, {}, {}),
    ({"language": "<|de|>", "task": "translate"}, {}, {}),
    ({"language": "de", "task": "translate"}, {}, {"language": "en", "task": "transcribe"}),
    ({"task": "translate"}, {}, {}),
    ({"forced_decoder_ids": [[1, None], [2, 7]]}, {}, {}),
    ({"forced_decoder_ids": [[1, 5], [2, 7], [3, 18]]}, {}, {}),
    ({"forced_decoder_ids": [[2, 5]]}, {}, {}),
    ({"forced_decoder_ids": [[1, 5], [2, 7]]}, {}, {"task": "transcribe"}),
    ({"forced_decoder_ids": [[1, 5], [2, 7]]}, {}, {"language": "de"}),
    ({}, {"forced_decoder_ids": [[1, 5], [2, 7]]}, {}),
    ({"forced_decoder_ids": [[1, 4]]}, {"forced_decoder_ids": [[1, 5], [2, 7]]}, {}),
    ({"task_to_id": None}, {}, {"language": "en"}),
    (WITHOUT_LANGUAGES, {}, {}),
    ({"no_timestamps_token_id": None}, {}, {}),
    ({"suppress_tokens": None, "begin_suppress_tokens": None}, {}, {}),
    ({"suppress_tokens": None}, {"suppress_tokens": [8, 17], "begin_suppress_tokens": [8]}, {}),
    ({"suppress_tokens": [8, 17, 4, 2]}, {}, {}),
    ({"begin_suppress_tokens": [8, 4, 17, 1]}, {}, {}),
    ({"max_length": 5}, {}, {}),
    ({"max_length": 448}, {}, {"task": "transcribe"}),
    ({"max_new_tokens": 4}, {}, {}),
    ({"max_new_tokens": 16}, {}, {"language": "de"}),
]


@pytest.mark.parametrize(("said", "config", "asked"), ASKED)
@torch.no_grad()
def test_transcriptions_are_those_of_transformers(whisper, said, config, asked, tmp_path):
    transformers = pytest.importorskip("transformers")
    given = {key: value for key, value in (HEARD | said).items() if value is not None}
    folder = copied(whisper[1], tmp_path / "folder", given, config)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    reader = transformers.WhisperFeatureExtractor.from_pretrained(folder)
    transcriber = Transcriber(folder)
    for seed in range(3):
        loud = some_audio(seed)
        heard = reader((loud / 32768).numpy(), sampling_rate=16000, return_tensors="pt")["input_features"]
        frames = transcriber.reader(loud / 32768)
        torch.testing.assert_close(frames, heard[0].T, rtol=0, atol=1e-5)
        once = {"force_unique_generate_call": True, "return_dict_in_generate": True}  # with the tokens it begins with
        theirs = model.generate(heard, **asked, **once).sequences[0].tolist()
        begin = transcriber.prompt.tokens(
            asked.get("language"), asked.get("task"), lambda frames=frames: transcriber.language(frames)
        )
        found = transcriber.tokens(frames, begin)
        assert [*begin, *found] == [token for token in theirs if token != END["eos_token_id"]]
        ours = transcriber.transcribe(write_wav(tmp_path / "talk.wav", loud), **asked)
        assert ours == transcriber.text(found).strip()


@torch.no_grad()
def test_a_suppressed_token_is_not_written_however_likely_it_is(whisper, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper[1]).eval()
    model.model.decoder.layer_norm.weight *= 40.0  # logits of hundreds
    model.model.decoder.layer_norm.bias *= 40.0
    frames, begin = Transcriber(whisper[1]).reader(some_audio(0) / 32768), (0, 3, 6, 18)
    logits = model(frames.T[None], decoder_input_ids=torch.tensor([begin])).logits[0, -1]
    likely = logits.topk(4).indices.tolist()
    said = HEARD | {"suppress_tokens": likely[:3], "begin_suppress_tokens": likely[3:]}
    folder = copied(whisper[1], tmp_path / "folder", said)
    model.generation_config = transformers.GenerationConfig(**said)
    model.save_pretrained(folder)
    theirs = model.generate(frames.T[None], language="en")[0].tolist()
    assert Transcriber(folder).tokens(frames, begin) == theirs
    assert not set(theirs) & set(likely[:3])
    assert logits.amax() - logits[theirs[0]] > 100


def test_every_key_of_a_generation_config_is_read_refused_or_changes_no_greedy_token(whisper, tmp_path):
    transformers = pytest.importorskip("transformers")
    sampling = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
    beams = {"early_stopping", "length_penalty", "diversity_penalty", "low_memory"}
    caches = {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"}
    caches |= {"compile_config", "disable_compile", "continuous_batching_config"}
    assistants = {"is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind"}
    assistants |= {
        f"assistant_{word}" for word in ("confidence_threshold", "early_exit", "lookbehind", "ensemble_weight")
    }
    assistants |= {"max_matching_ngram_size", "speculation_type"}
    returned = {f"output_{word}" for word in ("attentions", "hidden_states", "scores", "logits")}
    same = {"renormalize_logits", "remove_invalid_values", "return_dict_in_generate", "transformers_version"}
    read = {f"{word}_token_id" for word in ("decoder_start", "eos", "bos", "pad")}
    read |= {"max_length", "max_new_tokens", "suppress_tokens", "begin_suppress_tokens"}
    keys = {key for key in transformers.GenerationConfig().__dict__ if not key.startswith("_")}
    assert keys - sampling - beams - caches - assistants - returned - same - read <= set(DISABLING_VALUES)
    for key, allowed in DISABLING_VALUES.items():
        folder = copied(whisper[1], tmp_path / key, HEARD | {key: 2.5})
        with pytest.raises(CheckpointInvalid, match=rf"generation_config\.json: {key}: "):
            Transcriber(folder)
        assert None in allowed


def test_what_a_whisper_does_not_know_is_refused(whisper, peer, tmp_path):
    _, folder = whisper
    transcriber = Transcriber(folder)
    with pytest.raises(InvalidValue, match=r"language.*de, en, fr"):
        transcriber.prompt.tokens("xx", "transcribe", str)
    with pytest.raises(InvalidValue, match="task"):
        transcriber.prompt.tokens("en", "sing", str)
    for said, match in [
        ({"decoder_start_token_id": None}, "decoder_start_token_id"),
        ({"forced_decoder_ids": [[1, 4], [3, 7]]}, "forced_decoder_ids.*consecutive positions"),
        ({"suppress_tokens": "all"}, "suppress_tokens"),
        ({"eos_token_id": 2}, r"eos_token_id.*\[1, 2\]"),
        ({"return_timestamps": True}, "return_timestamps"),
    ]:
        with pytest.raises(CheckpointInvalid, match=match):
            Transcriber(copied(folder, tmp_path / next(iter(said)), HEARD | said))
    greedy = Transcriber(copied(folder, tmp_path / "long", HEARD | {"max_new_tokens": 40}))
    with pytest.raises(InvalidValue, match=r"max_new_tokens.*at most 16"):
        greedy.tokens(greedy.reader(some_audio(0) / 32768), (0, 3, 6, 18))
    with pytest.raises(Incompatible, match="takes no audio"):
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
