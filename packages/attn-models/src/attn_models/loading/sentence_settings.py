"""How sentence-transformers reads texts before the encoder: prompts, the longest text, lower case."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_core.errors import CheckpointInvalid

from attn_models.tokenizers import Tokenizer
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json_object

TRANSFORMER_FILE, MODEL_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
TOKENIZER_FILE = "tokenizer_config.json"
HIDDEN_STATES: Mapping[str, tuple[Any, ...]] = {
    "transformer_task": ("feature-extraction",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
    "module_output_name": ("token_embeddings",),
    "processing_kwargs": (None, {}),
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
}
"""Keys of the first module, and the only values with which its output is the hidden state of each token."""
TRANSFORMER_KEYS = ("max_seq_length", "do_lower_case", "unpad_inputs")
MODEL_KEYS = (
    *("__version__", "model_type", "similarity_fn_name"),  # how vectors are compared does not change them
    *("prompts", "default_prompt_name", "truncate_dim"),
)


@dataclass(frozen=True, slots=True)
class SentenceSettings:
    """`prompt` is put in front of every text; one of more than `limit` tokens is cut, special tokens kept. `lower`
    texts are read in lower case. `truncate_dim` is the number of elements of a vector that are kept. None: not limited.
    """

    prompt: str = ""
    limit: int | None = None
    lower: bool = False
    truncate_dim: int | None = None

    def read(self, tokenizer: Tokenizer, texts: list[str], max_tokens: int | None = None) -> list[list[int]]:
        """The token ids of each text, cut to `max_tokens` if that is less than the folder's own limit."""
        given = [(self.prompt + text).lower() if self.lower else self.prompt + text for text in texts]
        ids, limit = tokenizer.encode_batch(given), min(filter(None, (self.limit, max_tokens)), default=None)
        if limit is None:
            return ids
        return [
            row if len(row) <= limit else tokenizer.encode_first(text, limit)
            for text, row in zip(given, ids, strict=True)
        ]

    def prompt_tokens(self, tokenizer: Tokenizer) -> int:
        """The number of tokens of the prompt at the beginning of a text."""
        ids = self.read(tokenizer, [""])[0] if self.prompt else []
        return len(ids) - (1 if ids and ids[-1] in tokenizer.special_ids else 0)


def read_sentence_settings(folder: Path) -> SentenceSettings:
    """The settings of a sentence-transformers folder; those of a folder without its files change nothing.

    Raises `CheckpointInvalid` naming a key that is unknown, or a value with which other vectors would result.
    """
    first, model = _values(folder, TRANSFORMER_FILE), _values(folder, MODEL_FILE)
    _require_known(folder / TRANSFORMER_FILE, first, {*HIDDEN_STATES, *TRANSFORMER_KEYS})
    _require_known(folder / MODEL_FILE, model, MODEL_KEYS)
    for key, allowed in HIDDEN_STATES.items():
        if key in first and first[key] not in allowed:
            rule = f"{key} is {first[key]!r}; allowed: {' or '.join(map(repr, allowed))}"
            raise CheckpointInvalid.of(folder / TRANSFORMER_FILE, rule)
    prompts, name = model.get("prompts") or {}, model.get("default_prompt_name")
    if name is not None and not isinstance(prompts.get(name), str):
        raise CheckpointInvalid.of(folder / MODEL_FILE, f"default_prompt_name {name!r} is none of {sorted(prompts)}")
    described = first or model
    usual = _values(folder, TOKENIZER_FILE).get("model_max_length") if described else None
    limit = first.get("max_seq_length")
    return SentenceSettings(
        prompt="" if name is None else prompts[name],
        limit=_count(folder / TRANSFORMER_FILE, "max_seq_length", usual if limit is None else limit),
        lower=bool(first.get("do_lower_case")),
        truncate_dim=_count(folder / MODEL_FILE, "truncate_dim", model.get("truncate_dim")),
    )


def _values(folder: Path, name: str) -> Mapping[str, Any]:
    path = member(folder, name)
    return read_json_object(path, CONFIG_LIMIT) if path.is_file() else {}


def _require_known(path: Path, values: Mapping[str, Any], known: Collection[str]) -> None:
    if unknown := sorted(values.keys() - set(known)):
        raise CheckpointInvalid.of(path, f"unknown keys {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")


def _count(path: Path, key: str, value: Any) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise CheckpointInvalid.of(path, f"{key} is {value!r}; allowed: a whole number of at least 1, or null")
    return value
