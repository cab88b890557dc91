"""Transcription of audio with a Whisper model, through an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_models.adapters.base import require_allowed, required_count
from attn_models.encoder_decoder.whisper import Whisper
from attn_models.loading import load_model
from attn_models.loading.audio import read_feature_extractor, read_wav
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json_object
from attn_schema import EngineConfig, SamplingParams
from torch import Tensor

from attn_engine.build import build_engine
from attn_engine.engine import Engine
from attn_engine.request import Request

GENERATION, CONFIG = "generation_config.json", "config.json"
TASKS = ("transcribe", "translate")
FORCED = "forced_decoder_ids"
DISABLING_VALUES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (None, 1)),
    **dict.fromkeys(
        ("do_sample", "token_healing", "use_mtp", "return_timestamps", "condition_on_prev_tokens"), (None, False)
    ),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (None, 1)),
    **dict.fromkeys(
        ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)
    ),
    **dict.fromkeys(
        ("bad_words_ids", "sequence_bias", "force_words_ids", "constraints", "stop_strings", "max_time"), (None,)
    ),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("penalty_alpha", "dola_layers", "watermarking_config", "prompt_lookup_num_tokens"), (None,)),
    **dict.fromkeys(("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold"), (None,)),
}
"""Unsupported keys of generation_config.json that could change the generated tokens, and the values that disable them.
"""


@dataclass(frozen=True, kw_only=True)
class WhisperPrompt:
    """The parts of a generation_config.json that determine the decoder prompt, the length and the allowed tokens.

    The decoder prompt is `start`, a language token of `languages`, a task token of `tasks`, and `no_timestamps`. If the
    caller gives neither language nor task, `language` and `task` are the folder's defaults, or `forced` are their
    tokens, with None for a language that is to be detected. Tokens in `suppressed` are never generated, those in
    `suppressed_first` not at the beginning. The length is limited by `max_new_tokens`, or by `max_length`, which
    includes the decoder prompt; if both are None, by the model's context length.
    """

    start: int
    languages: Mapping[str, int]
    tasks: Mapping[str, int]
    english_only: bool
    language: str | None
    task: str | None
    forced: tuple[int | None, ...]
    no_timestamps: int | None
    suppressed: frozenset[int]
    suppressed_first: frozenset[int]
    max_length: int | None
    max_new_tokens: int | None

    @classmethod
    def of(cls, values: Mapping[str, Any], config: Mapping[str, Any]) -> WhisperPrompt:
        """Read a generation_config.json and the config.json beside it, whose `forced_decoder_ids` are used if the first
        has none.

        Raises `InvalidValue` naming a key that is missing, invalid or asks for an unsupported feature.
        """
        require_allowed(values, DISABLING_VALUES)
        start = _token(values, "decoder_start_token_id")
        if start is None:
            raise InvalidValue.of("decoder_start_token_id", None, "a token id, in generation_config.json")
        languages, forced = _by_name(values, "lang_to_id"), values.get(FORCED)
        lengths = {name: values.get(name) and required_count(values, name) for name in ("max_length", "max_new_tokens")}
        return cls(
            start=start,
            languages={_code(name): token for name, token in languages.items()},
            tasks=_by_name(values, "task_to_id"),
            english_only=values.get("is_multilingual") is False,
            language=None if values.get("language") is None else _code(str(values["language"])),
            task=values.get("task"),
            forced=_forced(config.get(FORCED) if forced is None else forced),
            no_timestamps=_token(values, "no_timestamps_token_id"),
            suppressed=_tokens(values, "suppress_tokens"),
            suppressed_first=_tokens(values, "begin_suppress_tokens"),
            **lengths,
        )

    def tokens(self, language: str | None, task: str | None, guess: Callable[[], str]) -> tuple[int, ...]:
        """The decoder prompt for a language and a task, as transformers' `generate` chooses it; `guess` detects the
        language if neither the caller nor the folder sets it.

        Raises `InvalidValue` for a language or task that the model does not know.
        """
        self._check(language, task)
        if self.english_only:
            language, task = None, None
        language, task = language or self.language, task or self.task
        self._check(language, task)
        begun = [] if language or task else list(self.forced)
        if language is None and self.languages and (not begun or begun[0] is None):
            begun[:1] = [self.languages[guess()]]
        elif language is not None and self.languages:
            begun = [self.languages[language]]
        if self.tasks and (task or language):
            begun.append(self.tasks[task or TASKS[0]])
        found = [self.start, *(token for token in begun if token is not None)]
        ended = self.no_timestamps is None or found[-1] == self.no_timestamps
        return (*found, *(() if ended else (self.no_timestamps,)))

    def _check(self, language: str | None, task: str | None) -> None:
        tasks = TASKS[:1] if self.english_only or not self.tasks else tuple(self.tasks)
        if task is not None and task not in tasks:
            raise InvalidValue.of("task", task, ", ".join(tasks))
        languages = ("en",) if self.english_only or not self.languages else tuple(sorted(self.languages))
        if language is not None and language not in languages:
            raise InvalidValue.of("language", language, ", ".join(languages))

    def room(self, begin: int, longest: int) -> int:
        """The maximum number of tokens after a decoder prompt of `begin` tokens, for a context length of `longest`.

        Raises `InvalidValue` if the folder's `max_new_tokens` exceeds the context length.
        """
        if self.max_new_tokens is not None:
            if begin + self.max_new_tokens > longest:
                raise InvalidValue.of("max_new_tokens", self.max_new_tokens, f"at most {longest - begin}")
            return self.max_new_tokens
        if self.max_length is None:
            return longest - begin
        return min(self.max_length + min(begin, longest // 2 - 1), longest) - begin


def _code(spelled: str) -> str:
    """The language code in a language token: "en" for "<|en|>"."""
    return spelled.removeprefix("<|").removesuffix("|>")


def _is_token(given: Any) -> bool:
    return type(given) is int and given >= 0


def _token(values: Mapping[str, Any], key: str) -> int | None:
    found = values.get(key)
    if found is not None and not _is_token(found):
        raise InvalidValue.of(key, found, "a token id, in generation_config.json")
    return found


def _tokens(values: Mapping[str, Any], key: str) -> frozenset[int]:
    found = values.get(key) or []
    if not isinstance(found, list) or not all(map(_is_token, found)):
        raise InvalidValue.of(key, found, "a list of token ids")
    return frozenset(found)


def _by_name(values: Mapping[str, Any], key: str) -> dict[str, int]:
    found = values.get(key) or {}
    if not isinstance(found, Mapping) or not all(map(_is_token, found.values())):
        raise InvalidValue.of(key, found, "an object that maps names to token ids")
    return dict(found)


def _forced(given: Any) -> tuple[int | None, ...]:
    """The tokens of [place, token] pairs with consecutive places from 1 on; empty if the first place is not 1."""
    pairs = given or []
    known = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not known or not all(token is None or _is_token(token) for _, token in pairs):
        raise InvalidValue.of(FORCED, given, "pairs of a position and a token id")
    if not pairs or pairs[0][0] != 1:
        return ()
    if [place for place, _ in pairs] != list(range(1, len(pairs) + 1)):
        raise InvalidValue.of(FORCED, given, "consecutive positions, from 1 on")
    return tuple(token for _, token in pairs)


class Transcriber:
    """Transcribes audio with the Whisper model in `folder`.

    Audio is split into segments of the maximum length that the model takes, which are transcribed independently. Raises
    `Incompatible` for another model, `CheckpointInvalid` for a generation_config.json that asks for an unsupported
    feature, and what loading raises.
    """

    def __init__(self, folder: Path, config: EngineConfig = EngineConfig()) -> None:  # noqa: B008  (frozen)
        loaded = load_model(folder, config.dtype, device=config.device, quantization=config.quantization)
        if not isinstance(loaded.model, Whisper):
            raise Incompatible(
                f"a model of the family {loaded.family} takes no audio; load a Whisper model", folder=folder
            )
        if loaded.tokenizer is None:
            raise InvalidValue.of("model", str(folder), "a model folder with a tokenizer.json")
        self.model: Whisper = loaded.model
        self.tokenizer = loaded.tokenizer
        try:
            self.prompt = WhisperPrompt.of(loaded.generation, read_json_object(member(folder, CONFIG), CONFIG_LIMIT))
            self._check_ends(loaded.generation.get("eos_token_id"))
        except InvalidValue as error:
            raise CheckpointInvalid.of(folder / GENERATION, error.message) from error
        self.reader = read_feature_extractor(folder, *reversed(self.model.encoder_features))
        self._engine: Engine = build_engine(self.model, self.tokenizer, config)

    def _check_ends(self, given: Any) -> None:
        """Raise `InvalidValue` if the folder's end tokens are not those of the tokenizer, at which the engine stops."""
        ends = set(given if isinstance(given, list) else [given]) - {None}
        if ends and ends != self.tokenizer.end_ids:
            allowed = f"{sorted(self.tokenizer.end_ids)}, the end-of-sequence tokens of the tokenizer"
            raise InvalidValue.of("eos_token_id", given, allowed)

    def transcribe(self, path: str | Path, *, language: str | None = None, task: str | None = None) -> str:
        """The text of a WAV file, in its own language, or in English with the task `translate`.

        `language` is a code such as "en". If it or the task is not given, the folder's generation_config.json decides;
        if that does not set it, the model detects the language from the first segment. Raises `InvalidValue` for a file
        that cannot be read, and for a language or task that the model does not know.
        """
        samples = read_wav(path)
        stretches = [self.reader(stretch) for stretch in torch.split(samples, self.reader.longest)]
        begin = self.prompt.tokens(language, task, lambda: self.language(stretches[0]))
        texts = [self.text(self.tokens(frames, begin)) for frames in stretches]
        return " ".join(text.strip() for text in texts if text.strip())

    def text(self, tokens: list[int]) -> str:
        """Decode tokens to text, without timestamp tokens, which are the last ones in the vocabulary."""
        first = self.prompt.no_timestamps
        return self.tokenizer.decode([token for token in tokens if first is None or token < first])

    @torch.inference_mode()
    def language(self, frames: Tensor) -> str:
        """Detect the most likely language of frames [num_frames, num_mel_bins]."""
        device = next(self.model.parameters()).device
        start = torch.tensor([[self.prompt.start]], device=device)
        logits: Tensor = self.model(start, frames[None].to(device))[0, -1].float()
        return max(self.prompt.languages, key=lambda name: float(logits[self.prompt.languages[name]]))

    @torch.inference_mode()
    def tokens(self, frames: Tensor, begin: tuple[int, ...]) -> list[int]:
        """The greedily generated tokens of frames [num_frames, num_mel_bins] after the decoder prompt `begin`, without
        end-of-sequence tokens."""
        room = self.prompt.room(len(begin), self.model.max_seq_len)
        if room < 1:
            return []
        request = Request(
            id="audio",
            token_ids=begin,
            encoder_features=frames,
            suppress_tokens=self.prompt.suppressed,
            begin_suppress_tokens=self.prompt.suppressed_first,
            params=SamplingParams(temperature=0, max_new_tokens=room),
        )
        self._engine.submit(request)
        found: list[int] = []
        while not self._engine.idle:
            for output in self._engine.step():
                if output.error is not None:
                    raise output.error
                found += [token.id for token in output.delta.tokens]
        return [token for token in found if token not in self.tokenizer.end_ids]
