"""The settings of a tokenizer besides its vocabulary: special tokens and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid
from tokenizers import AddedToken

from attn_models.weights.manifest import listed_member, read_manifest
from attn_models.weights.safe_files import CONFIG_LIMIT, read_config

CONFIG_NAME = "tokenizer_config.json"
GENERATION_NAME = "generation_config.json"
TOKENS_NAME = "special_tokens_map.json"
MODEL_NAME = "config.json"
ADDED_NAME = "added_tokens.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have names, as in transformers."""
TEMPLATE_NAME = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The spellings of special tokens, and the chat template; None for those that the model does not have.

    `eos_ids` are ids that end a generation in addition to that of `eos_token`; `decoder_start_id` is the first token
    that an encoder-decoder's decoder reads, if it is not `bos_token`, and `forced_bos_id` the second, if there is one.
    """

    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    mask_token: str | None = None
    sep_token: str | None = None
    cls_token: str | None = None
    chat_template: str | None = None
    eos_ids: tuple[int, ...] = ()
    decoder_start_id: int | None = None
    forced_bos_id: int | None = None

    @property
    def special_tokens(self) -> dict[str, str]:
        """The spellings of the special tokens that the model has, by name: what transformers tells a chat template."""
        found = {name: getattr(self, name) for name in SPECIAL_TOKENS}
        return {name: spelling for name, spelling in found.items() if spelling is not None}

    def to_config(self) -> dict[str, Any]:
        """The content of a tokenizer_config.json with these settings, for Hugging Face's libraries."""
        given = {} if self.chat_template is None else {"chat_template": self.chat_template}
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        return kind | self.special_tokens | given


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in `folder`: tokenizer_config.json, chat_template.jinja and generation_config.json.

    Special tokens that tokenizer_config.json does not name are read from special_tokens_map.json; ids that end or begin
    a generation from config.json if generation_config.json has none, as in transformers. Missing files count as empty.
    Raises `CheckpointInvalid` for malformed files, and for files that the folder's manifest does not list; hashes are
    checked by `read_folder`, not here.
    """
    records = read_manifest(folder)
    config = _config(listed_member(folder, CONFIG_NAME, records))
    spelled = _config(listed_member(folder, TOKENS_NAME, records)) | _named(config)
    generation = _named(_config(listed_member(folder, GENERATION_NAME, records)))
    said = _config(listed_member(folder, MODEL_NAME, records)) | generation
    ends, starts = (
        said.get("eos_token_id"),
        [said.get(name) for name in ("decoder_start_token_id", "forced_bos_token_id")],
    )
    start, forced = (token if type(token) is int and token >= 0 else None for token in starts)
    ends = ends if isinstance(ends, list) else [ends]
    return TokenizerSettings(
        **{name: _spelling(spelled.get(name)) for name in SPECIAL_TOKENS},
        chat_template=_template(listed_member(folder, TEMPLATE_NAME, records), config),
        eos_ids=tuple(end for end in ends if type(end) is int and end >= 0),
        decoder_start_id=start,
        forced_bos_id=forced,
    )


@dataclass(frozen=True, kw_only=True)
class VocabularySettings:
    """What the files beside a vocabulary say of it.

    `config` is tokenizer_config.json, `kind` the class that it names without "Fast", `added` the tokens that it gives
    ids to, `named` and `spelled` the special tokens and their spellings by name. The embedding has `rows` rows, 0 if
    unknown, of a model of the type `model_type`.
    """

    config: Mapping[str, Any]
    kind: str
    added: Mapping[int, AddedToken]
    named: tuple[AddedToken, ...]
    spelled: Mapping[str, str | None]
    rows: int
    model_type: str


def read_vocabulary_settings(folder: Path) -> VocabularySettings:
    """What the files of `folder` say of its vocabulary; raises as `read_settings`."""
    records = read_manifest(folder)
    config = _config(listed_member(folder, CONFIG_NAME, records))
    said = _config(listed_member(folder, TOKENS_NAME, records)) | _named(config)
    added: dict[int, AddedToken] = {}
    for place, token in dict(config.get("added_tokens_decoder") or {}).items():
        if not str(place).isdecimal() or (found := _token(token)) is None:
            raise CheckpointInvalid.of(folder / CONFIG_NAME, f"added_tokens_decoder[{place!r}] is no token")
        added[int(place)] = found
    known = {token.content for token in added.values()}
    for spelled, place in _config(listed_member(folder, ADDED_NAME, records)).items():
        if type(place) is not int or place < 0:
            raise CheckpointInvalid.of(folder / ADDED_NAME, f"the id of {spelled!r} is {place!r}")
        if spelled not in known:
            added[place] = AddedToken(spelled, normalized=False)
    others = [said.get(key) or [] for key in ("additional_special_tokens", "extra_special_tokens")]
    several = [token for tokens in others for token in (tokens.values() if isinstance(tokens, dict) else tokens)]
    model = _config(listed_member(folder, MODEL_NAME, records))
    text = model.get("text_config")
    rows = (text if isinstance(text, dict) and "vocab_size" in text else model).get("vocab_size")
    tokens = [_token(token, special=True) for token in (*(said.get(name) for name in SPECIAL_TOKENS), *several)]
    return VocabularySettings(
        config=config,
        kind=str(config.get("tokenizer_class") or "").removesuffix("Fast"),
        added=added,
        named=tuple(token for token in tokens if token is not None),
        spelled={name: _spelling(said.get(name)) for name in SPECIAL_TOKENS},
        rows=rows if type(rows) is int else 0,
        model_type=str(model.get("model_type")),
    )


FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def _token(given: Any, *, special: bool = False) -> AddedToken | None:
    """A token of tokenizer_config.json, spelled or with its flags, which is special if it has a name; None if it is
    neither."""
    spelled = _spelling(given)
    if not spelled:
        return None
    flags = {name: given[name] for name in FLAGS if isinstance(given, Mapping) and type(given.get(name)) is bool}
    return AddedToken(spelled, **({"normalized": not special} | flags | ({"special": True} if special else {})))


def settings_files(folder: Path) -> dict[str, Any]:
    """The contents of the files of `folder` that `read_settings` reads of a tokenizer, without keys that name
    code."""
    records = read_manifest(folder)
    files: dict[str, Any] = {
        name: read_config(path)
        for name in (CONFIG_NAME, TOKENS_NAME)
        if (path := listed_member(folder, name, records)) is not None
    }
    template = listed_member(folder, TEMPLATE_NAME, records)
    return files if template is None else files | {TEMPLATE_NAME: template.read_bytes()}


def _config(path: Path | None) -> dict[str, Any]:
    return read_config(path) if path is not None else {}


def _named(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _spelling(token: Any) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template(path: Path | None, config: Mapping[str, Any]) -> str | None:
    if path is not None:
        if path.stat().st_size > CONFIG_LIMIT:
            raise CheckpointInvalid.of(path, f"a chat template of more than {CONFIG_LIMIT} bytes")
        return path.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, Mapping) and item.get("name") == "default"]
        template = named[0].get("template") if named else None
    return template if isinstance(template, str) else None
