"""The audio input of Whisper: reads WAV files and computes log-Mel spectrograms."""

from __future__ import annotations

import math
import wave
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from torch import Tensor

from attn_models.adapters.base import require_allowed, required_count
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json_object

PREPROCESSOR = "preprocessor_config.json"
SAMPLING_RATE, HOP, WINDOW, SECONDS = 16000, 160, 400, 30
HIGHEST_HERTZ = 8000.0
LINEAR_HERTZ, LINEAR_MELS = 1000.0, 15.0
"""The frequency in hertz and in mels up to which mels are proportional to hertz (Slaney 1998, Auditory Toolbox)."""
LOG_STEP = math.log(6.4) / 27.0
"""The logarithm of the ratio of the frequencies of neighbouring mels above `LINEAR_MELS`."""
MIN_POWER, LOG_RANGE = 1e-10, 8.0


def hertz_of(mels: Tensor) -> Tensor:
    """The frequencies in hertz of mels on Slaney's scale: linear up to 1000 Hz, logarithmic above."""
    linear = mels * (LINEAR_HERTZ / LINEAR_MELS)
    return torch.where(mels < LINEAR_MELS, linear, LINEAR_HERTZ * torch.exp(LOG_STEP * (mels - LINEAR_MELS)))


def mel_filters(num_mel_bins: int) -> Tensor:
    """Triangular mel filters [num_mel_bins, WINDOW / 2 + 1], float64, each of area 1, over the bins of a spectrum."""
    highest = LINEAR_MELS + math.log(HIGHEST_HERTZ / LINEAR_HERTZ) / LOG_STEP
    edges = hertz_of(torch.linspace(0, highest, num_mel_bins + 2, dtype=torch.float64))
    bins = torch.linspace(0, SAMPLING_RATE // 2, WINDOW // 2 + 1, dtype=torch.float64)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]


class LogMel:
    """Computes log-Mel spectrograms of `num_mel_bins` numbers per frame, 100 frames per second; audio is padded with
    silence to `num_frames` frames (Radford et al. 2022, arXiv 2212.04356, section 2.2)."""

    def __init__(self, num_mel_bins: int, num_frames: int) -> None:
        self.num_frames = num_frames
        self.filters = mel_filters(num_mel_bins).float()

    @property
    def longest(self) -> int:
        """The number of samples of the longest audio."""
        return self.num_frames * HOP

    def __call__(self, samples: Tensor) -> Tensor:
        """Frames [num_frames, num_mel_bins], float32, of `samples` [samples] from -1 to 1, `SAMPLING_RATE` per second.

        Raises `InvalidValue` for no samples, and for more than `longest`.
        """
        if samples.dim() != 1 or not 0 < len(samples) <= self.longest:
            allowed = f"1 to {self.longest} samples, {self.longest / SAMPLING_RATE:g} s at {SAMPLING_RATE} Hz"
            raise InvalidValue.of("samples", f"the shape {list(samples.shape)}", allowed)
        padded = torch.nn.functional.pad(samples.float(), (0, self.longest - len(samples)))
        spectrum = torch.stft(padded, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
        power = spectrum[:, :-1].abs() ** 2
        loudness = (self.filters @ power).clamp(min=MIN_POWER).log10()
        return ((torch.maximum(loudness, loudness.max() - LOG_RANGE) + 4) / 4).T.contiguous()


def read_feature_extractor(folder: Path, num_mel_bins: int, num_frames: int) -> LogMel:
    """The spectrogram that a folder's preprocessor_config.json describes; the sizes are those of the model.

    Raises `CheckpointInvalid` for settings other than Whisper's, or sizes that differ from the model's.
    """
    path = member(folder, PREPROCESSOR)
    values: Mapping[str, Any] = read_json_object(path, CONFIG_LIMIT) if path.is_file() else {}
    seconds = num_frames * HOP // SAMPLING_RATE
    expected = {"sampling_rate": SAMPLING_RATE, "hop_length": HOP, "n_fft": WINDOW, "dither": 0.0, "padding_value": 0.0}
    expected |= {"feature_size": num_mel_bins, "do_normalize": False}
    try:
        require_allowed(values, {name: (value,) for name, value in expected.items()})
        if values and required_count(values, "chunk_length", SECONDS) != seconds:
            raise InvalidValue.of(
                "chunk_length", values.get("chunk_length"), f"{seconds}, the seconds of audio that the model reads"
            )
    except InvalidValue as error:
        raise CheckpointInvalid.of(path, error.message) from error
    return LogMel(num_mel_bins, num_frames)


WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The dtype of a sample by its number of bytes."""


def read_wav(path: str | Path) -> Tensor:
    """Samples [samples], float32, from -1 to 1, of a WAV file with 8, 16 or 32 bits per sample; channels are averaged.

    Raises `InvalidValue` for any other file, and for a sampling rate other than `SAMPLING_RATE`.
    """
    try:
        with wave.open(str(path)) as file:
            rate, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise InvalidValue.of("audio", str(path), f"a WAV file of integer samples ({error})") from error
    if rate != SAMPLING_RATE:
        remedy = f"ffmpeg -i {Path(path).name} -ar {SAMPLING_RATE} converted.wav"
        raise InvalidValue.of("audio", f"{rate} samples per second", f"{SAMPLING_RATE}: {remedy}")
    if width not in WIDTHS or not data:
        raise InvalidValue.of(
            "audio",
            f"{8 * width} bits per sample, {len(data)} bytes",
            "8, 16 or 32 bits per sample, and at least one sample",
        )
    found = torch.frombuffer(bytearray(data), dtype=WIDTHS[width]).double()
    half = 2.0 ** (8 * width - 1)
    found = (found - half if width == 1 else found) / half  # 8-bit samples are from 0 to 255
    samples: Tensor = found.view(-1, channels).mean(-1).float()
    return samples
