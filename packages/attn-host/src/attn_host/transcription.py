"""Text from audio with a Whisper, through an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_engine import Engine, Request, build_engine
from attn_models.encoder_decoder.whisper import Whisper
from attn_models.loading import load_model
from attn_models.loading.audio import read_feature_extractor, read_wav
from attn_schema import EngineConfig, SamplingParams
from torch import Tensor

NEVER = -100.0
"""The bias of a token that is not to be written."""
TASKS = ("transcribe", "translate")


@dataclass(frozen=True, kw_only=True)
class WhisperPrompt:
    """What generation_config.json says of how a text begins: `start`, languages and tasks by name (both empty where the
    model knows English alone), and the token that asks for no timestamps; and which tokens are never written, or not
    at the beginning."""

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    no_timestamps: int | None
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> WhisperPrompt:
        """Of a generation_config.json; raises `InvalidValue` where it does not say how a text begins."""
        start = values.get("decoder_start_token_id")
        if type(start) is not int:
            raise InvalidValue.of("decoder_start_token_id", start, "a token, in generation_config.json")
        many = values.get("is_multilingual") is not False
        languages = values.get("lang_to_id") or {} if many else {}
        return cls(
            start=start,
            languages={name.removeprefix("<|").removesuffix("|>"): token for name, token in languages.items()},
            tasks=(values.get("task_to_id") or {}) if many else {},
            no_timestamps=values.get("no_timestamps_token_id"),
            suppressed=tuple(values.get("suppress_tokens") or ()),
            suppressed_first=tuple(values.get("begin_suppress_tokens") or ()),
        )

    def tokens(self, language: str | None, task: str) -> tuple[int, ...]:
        """The tokens that a text in this language begins with; raises `InvalidValue` for a language or task that the
        model does not know."""
        if task not in (self.tasks or TASKS[:1]):
            raise InvalidValue.of("task", task, ", ".join(self.tasks or TASKS[:1]))
        if language is not None and language not in (self.languages or ("en",)):
            raise InvalidValue.of("language", language, ", ".join(sorted(self.languages or ("en",))))
        known = (self.languages[language or "en"], self.tasks[task]) if self.languages else ()
        return (self.start, *known, *(() if self.no_timestamps is None else (self.no_timestamps,)))


class Transcriber:
    """Loads the Whisper in `folder`. An audio is heard in stretches as long as the model hears at once, each for
    itself.

    Raises `Incompatible` for another model, and what loading raises.
    """

    def __init__(self, folder: Path, config: EngineConfig = EngineConfig()) -> None:  # noqa: B008  (frozen)
        loaded = load_model(folder, config.dtype, device=config.device, quantization=config.quantization)
        if not isinstance(loaded.model, Whisper):
            raise Incompatible(f"a {loaded.family} hears no audio; load a Whisper", folder=folder)
        if loaded.tokenizer is None:
            raise InvalidValue.of("model", str(folder), "a model folder with a tokenizer.json")
        self.model: Whisper = loaded.model
        self.tokenizer = loaded.tokenizer
        self.prompt = WhisperPrompt.of(loaded.generation)
        self.reader = read_feature_extractor(folder, *reversed(self.model.encoder_features))
        self._engine: Engine = build_engine(self.model, self.tokenizer, config)

    def transcribe(self, path: str | Path, *, language: str | None = None, task: str = "transcribe") -> str:
        """The text of a WAV file, in its language, or with the task `translate` in English.

        `language` is a code such as "en"; None lets the model guess it from the beginning. Raises `InvalidValue` for a
        file that is not read, and for a language or task that the model does not know.
        """
        samples = read_wav(path)
        stretches = [self.reader(stretch) for stretch in torch.split(samples, self.reader.longest)]
        if language is None and self.prompt.languages:
            language = self.language(stretches[0])
        begin = self.prompt.tokens(language, task)
        texts = [self.tokenizer.decode(self.tokens(frames, begin)) for frames in stretches]
        return " ".join(text.strip() for text in texts if text.strip())

    @torch.inference_mode()
    def language(self, frames: Tensor) -> str:
        """The likeliest language of frames [num_frames, num_mel_bins]."""
        logits = self._next(frames, (self.prompt.start,))
        return max(self.prompt.languages, key=lambda name: float(logits[self.prompt.languages[name]]))

    @torch.inference_mode()
    def tokens(self, frames: Tensor, begin: tuple[int, ...]) -> list[int]:
        """The likeliest tokens after those that a text begins with, without the one that ends it."""
        logits = self._next(frames, begin)
        logits[list({*self.prompt.suppressed, *self.prompt.suppressed_first})] = -torch.inf
        first = int(logits.argmax())
        if first in self.tokenizer.end_ids or len(begin) + 1 >= self.model.max_seq_len:
            return []
        bias = dict.fromkeys(self.prompt.suppressed, NEVER)
        room = self.model.max_seq_len - len(begin) - 1
        params = SamplingParams(temperature=0, max_new_tokens=room, logit_bias=bias)
        self._engine.submit(Request(id="audio", token_ids=(*begin, first), encoder_features=frames, params=params))
        found = [first]
        while not self._engine.idle:
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                found += [token.id for token in output.delta.tokens]
        return [token for token in found if token not in self.tokenizer.end_ids]

    def _next(self, frames: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Logits [vocabulary] of the token after these."""
        device = next(self.model.parameters()).device
        ids = torch.tensor([tokens], device=device)
        logits: Tensor = self.model(ids, frames[None].to(device))[0, -1].float()
        return logits
