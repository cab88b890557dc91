"""Whisper: transformers' logits and features, whole, stepped and packed, and audio that is not read."""

from __future__ import annotations

import json
import wave

import pytest
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_models.encoder_decoder.config import WhisperConfig
from attn_models.encoder_decoder.whisper import Whisper
from attn_models.loading import load_model, save_model
from attn_models.loading.audio import SAMPLING_RATE, LogMel, mel_filters, read_feature_extractor, read_wav
from attn_testing.memory import stepped_logits

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "intermediate_size": 24}
CONFIG = WhisperConfig(**SIZES, vocab_size=23, max_seq_len=20, max_encoder_len=10, num_mel_bins=6, num_decoder_layers=3)
FRAMES = torch.randn(3, 20, 6, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(23, (3, 15), generator=torch.Generator().manual_seed(2))


def drawn() -> Whisper:
    torch.manual_seed(0)
    model = Whisper(CONFIG).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.3)
    return model


@torch.no_grad()
def test_a_folder_comes_back_stepped_and_packed(tmp_path):
    model = drawn()
    folder = save_model(tmp_path / "whisper", model)
    loaded = load_model(folder)
    assert (loaded.family, loaded.config) == ("whisper", CONFIG)
    expected = model(TOKENS, FRAMES)
    # A checkpoint has no biases of keys, which change nothing.
    torch.testing.assert_close(loaded.model(TOKENS, FRAMES), expected)
    assert not loaded.model.decoder[0].attention.key.bias.any()
    for row in range(3):
        found = stepped_logits(loaded.model, TOKENS[row], [4, 1, 1, 9], FRAMES[row])
        torch.testing.assert_close(found, expected[row], rtol=0, atol=1e-4)
    packed = load_model(folder, quantization="int8").model(TOKENS, FRAMES)
    assert (packed.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("source", [None, TOKENS, FRAMES[:, :-1], FRAMES[..., :-1]])
def test_what_is_no_audio_is_refused(source):
    with pytest.raises(InvalidValue, match="frames of audio"):
        drawn()(TOKENS, source)


def test_padding_is_refused_as_silence_is_heard():
    with pytest.raises(InvalidValue, match="silence"):
        drawn()(TOKENS, FRAMES, torch.ones(3, 20, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_attention_heads": 2}, "decoder_attention_heads"),
        ({"scale_embedding": True}, "scale_embedding"),
        ({"activation_function": "swish"}, "activation_function"),
        ({"num_mel_bins": 7}, r"encoder\.conv1\.weight"),
        ({"encoder_layers": 3}, r"encoder\.layers\.2"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_its_key(change, said, tmp_path):
    folder = save_model(tmp_path / "whisper", drawn())
    (folder / "manifest.json").unlink()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(CheckpointInvalid, match=said):
        load_model(folder)


def write_wav(path, samples, rate=SAMPLING_RATE, width=2, channels=1):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return path


def test_samples_of_every_width_are_read_and_channels_become_their_mean(tmp_path):
    eight = read_wav(write_wav(tmp_path / "8.wav", bytes([0, 128, 192]), width=1))
    assert eight.tolist() == [-1.0, 0.0, 0.5]
    sixteen = torch.tensor([-32768, 0, 16384, 16384], dtype=torch.int16).numpy().tobytes()
    assert read_wav(write_wav(tmp_path / "16.wav", sixteen)).tolist() == [-1.0, 0.0, 0.5, 0.5]
    assert read_wav(write_wav(tmp_path / "2.wav", sixteen, channels=2)).tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("fields", "said"), [({"rate": 44100}, "44100.*16000"), ({"width": 3}, "24 bits"), ({"samples": b""}, "0 bytes")]
)
def test_audio_that_is_not_read_is_refused(fields, said, tmp_path):
    with pytest.raises(InvalidValue, match=said):
        read_wav(write_wav(tmp_path / "odd.wav", **{"samples": bytes(6)} | fields))
    (tmp_path / "text.wav").write_text("no audio")
    with pytest.raises(InvalidValue, match="a WAV file"):
        read_wav(tmp_path / "text.wav")


def test_a_tone_is_loudest_in_the_mel_that_holds_its_frequency():
    seconds = torch.arange(SAMPLING_RATE) / SAMPLING_RATE
    frames = LogMel(80, 300)(torch.sin(2 * torch.pi * 3000 * seconds))
    loudest = frames[50].argmax()
    bins = mel_filters(80)[loudest] > 0
    assert bins[75]  # 3000 Hz is the 75th of 40 Hz each
    assert torch.equal(frames[150:], frames[150:151].expand(150, -1))
    torch.testing.assert_close(frames.max() - frames.min(), torch.tensor(2.0))
    with pytest.raises(InvalidValue, match="1 to 48000 samples"):
        LogMel(80, 300)(torch.zeros(48001))


def test_a_preprocessor_that_listens_otherwise_is_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000}))
    with pytest.raises(CheckpointInvalid, match="sampling_rate"):
        read_feature_extractor(tmp_path, 80, 3000)


@pytest.mark.oracle
@pytest.mark.parametrize("bins", [80, 128])
def test_features_are_those_of_transformers(bins, tmp_path):
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    extractor.save_pretrained(tmp_path)
    ours = read_feature_extractor(tmp_path, bins, 3000)
    torch.testing.assert_close(ours.filters.T.double(), torch.from_numpy(extractor.mel_filters), rtol=0, atol=1e-8)
    for seconds in (0.3, 7, 30):
        samples = torch.randn(int(seconds * SAMPLING_RATE), generator=torch.Generator().manual_seed(1)) / 5
        theirs = extractor(samples.numpy(), sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"][0]
        torch.testing.assert_close(ours(samples), theirs.T, rtol=0, atol=1e-5)


@pytest.mark.oracle
def test_logits_are_those_of_transformers_both_ways(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    config = transformers.WhisperConfig(
        vocab_size=23,
        d_model=16,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=6,
        max_source_positions=10,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    peer = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("norm.weight" in name), std=0.3)
    peer.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs").model
    save_model(tmp_path / "ours", ours)
    back = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        for their in (peer, back):
            theirs = their(FRAMES.transpose(1, 2), decoder_input_ids=TOKENS).logits
            torch.testing.assert_close(ours(TOKENS, FRAMES), theirs, rtol=1e-5, atol=1e-5)
        for row in range(3):
            found = stepped_logits(ours, TOKENS[row], [3, 1, 1, 10], FRAMES[row])
            torch.testing.assert_close(found, theirs[row], rtol=1e-5, atol=1e-5)
