"""Applies tokenizer_config.json to the steps of a tokenizer.json, so that texts are split as the model was trained.

The steps of a published tokenizer.json hold. tokenizer_config.json changes them where transformers 4, with which most
of these files were made and used, changed them (`tokenization_utils_fast.py` and the classes' own files there); a key
that contradicts the steps and had no effect is reported. The cases are listed in docs/tokenizers.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from attn_core.errors import CheckpointInvalid
from tokenizers import processors

from attn_models.tokenizers.pre_tokenizers import PRE_TOKENIZERS, TEKKEN
from attn_models.tokenizers.settings import VocabularySettings
from attn_models.tokenizers.vocabulary import BLANK, LibraryErrors

TEMPLATED = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
"""The classes whose `add_bos_token` and `add_eos_token` replace the post-processor of a tokenizer.json."""
BY_CLASS = {
    "GPT2Tokenizer": "gpt-2",
    "RobertaTokenizer": "gpt-2",
    "GPTNeoXTokenizer": "mpt",
    "CohereTokenizer": "command-r",
    "Qwen2Tokenizer": "qwen2",
}
"""Classes whose own steps transformers 5 uses instead of those of tokenizer.json, by our name of these steps."""
HARD_TEXTS = (
    "The  quick\t brown fox isn't 1234567 years old; HE'S 3.14",
    "\n\n   def f(x):\r\n        return {'a': x**2}  # 你好，世界",
    "Cafe\u0301 naïve Å\u2126 हिन्दी తెలుగు မြန်မာ 한국어 ไทย",
    "camelCaseWords HTTPServer__init__ 👩‍👩‍👧👍🏽 \u3000١٢٣",
)
"""Texts that tokenizers of different steps split differently."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "do_basic_tokenize": (True, None),
    "never_split": (None, []),
    "word_tokenizer_type": (None, "basic"),
    "subword_tokenizer_type": (None, "wordpiece"),
    "src_lang": (None,),
    "tgt_lang": (None,),
    "language": (None,),
    "do_word_tokenize": (True, None),
    "bpe_dropout": (None, 0),
}
"""Keys that change tokens in a way that is not supported, and the values with which they do not."""
SILENT = re.compile(
    r"_.*|model_max_length|max_length|stride|(padding|truncation)(_\w+)?|pad_\w+|model_input_names|processor_class"
    r"|tokenizer_(class|file)|auto_map|name_or_path|special_tokens_map_file|use_fast|from_slow|backend|is_local|errors"
    r"|local_files_only|device_map|trust_remote_code|legacy|sp_model_kwargs|trim_offsets|spaces_between_special_tokens"
    r"|use_default_system_prompt|chat_template|\w+_template|response_schema|\w+_tokens?|extra_ids|keep_accents"
    r"|remove_space|vocab_file|merges_file|fast_tokenizer|return_\w+|model_type|transformers_version|phonemize\w*"
    r"|init_inputs|add_special_tokens|vocab_size|separate_vocabs|clean_up_tokenization_spaces\w*"
)
"""Keys that say nothing about how a text becomes tokens, and names of tokens."""
BERT_KEYS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
LOWER_CASING = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
"""Classes that write texts in lower case unless `do_lower_case` is False."""
ACTING = {*BERT_KEYS, "add_prefix_space", "split_special_tokens", "fix_mistral_regex", "added_tokens_decoder"}
"""Keys that act besides those of tokens and ends."""
INNER = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


class Steps:
    """The steps of a backend around its model, as JSON that can be changed."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        parts = {name: getattr(backend, name) for name in INNER}
        self.values = {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}
        self._before = json.dumps(self.values)

    def of(self, part: str, *kinds: str) -> Iterator[dict[str, Any]]:
        """The steps of these kinds, those within a Sequence included."""
        pending = [self.values[part]]
        while pending:
            step = pending.pop(0)
            if step is not None:
                pending = [*step.get(INNER[part], []), *pending]
                if step["type"] in kinds:
                    yield step

    def remove(self, part: str, kind: str) -> None:
        """Remove the steps of a kind."""
        found = self.values[part]
        inner = [] if found is None else found.get(INNER[part], [found])
        kept = [step for step in inner if step["type"] != kind]
        self.values[part] = {"type": "Sequence", INNER[part]: kept} if kept else None

    def write(self, backend: tokenizers.Tokenizer) -> None:
        """Give the backend these steps, if they were changed."""
        if json.dumps(self.values) == self._before:
            return
        model = {"type": "BPE", "vocab": {}, "merges": []}
        whole: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "post_processor": None,
            "model": model,
            **self.values,
        }
        made = tokenizers.Tokenizer.from_str(json.dumps(whole))
        for name in INNER:
            setattr(backend, name, getattr(made, name))


def apply_config(backend: tokenizers.Tokenizer, given: VocabularySettings, path: Path) -> tuple[str, ...]:
    """Change `backend` as the files beside tokenizer.json say; returns remarks for people, on what was decided.

    Raises `CheckpointInvalid`, naming the key, for what is not supported and for files that contradict each other.
    """
    config = given.config
    for key, allowed in NEUTRAL.items():
        if key in config and config[key] not in allowed:
            raise CheckpointInvalid.of(path, f"{key}: {config[key]!r} is not supported; remove the key to ignore it")
    unknown = sorted(key for key in config if key not in {*ACTING, *NEUTRAL} and not SILENT.fullmatch(key))
    remarks = [f"unknown keys are ignored: {', '.join(unknown)}"] if unknown else []
    with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"does not fit the vocabulary: {said}")):
        steps = Steps(backend)
        remarks += [
            *_apply_bert(steps, config),
            *_apply_prefix(steps, config),
            *_apply_tekken(steps, given, backend.get_vocab_size()),
        ]
        steps.write(backend)
        remarks += _add_tokens(backend, given, path)
        remarks += _apply_ends(backend, given, path)
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))
        remarks += ["special tokens spelled in a text are split"] if config.get("split_special_tokens") else []
        remarks += _other_class(backend, given.kind)
    return tuple(remarks)


def _apply_bert(steps: Steps, config: Mapping[str, Any]) -> Iterator[str]:
    usual = {"do_lower_case": True} if str(config.get("tokenizer_class")).startswith(LOWER_CASING) else {}
    said = {BERT_KEYS[key]: value for key, value in {**usual, **config}.items() if key in BERT_KEYS}
    for step in steps.of("normalizer", "BertNormalizer"):
        for name, value in said.items():
            if step[name] != value:
                yield f"{name}: {value}, as tokenizer_config.json says, not {step[name]} as in tokenizer.json"
                step[name] = value
        return
    lowers = any(steps.of("normalizer", "Lowercase"))
    if bool(said.get("lowercase", lowers)) != lowers:
        yield f"do_lower_case: {said['lowercase']} has no effect: the steps of tokenizer.json hold"


def _apply_prefix(steps: Steps, config: Mapping[str, Any]) -> Iterator[str]:
    """`add_prefix_space`, which put a blank before a text in a first step by bytes; False also takes Llama's away."""
    wanted = config.get("add_prefix_space")
    bytewise = list(steps.of("pre_tokenizer", "ByteLevel"))
    put = [step for step in steps.of("pre_tokenizer", "Metaspace") if step.get("prepend_scheme") != "never"]
    put += [step for step in steps.of("normalizer", "Prepend") if step["prepend"] == BLANK]
    before = bool(put) or any(step["add_prefix_space"] for step in bytewise)
    if wanted is None or bool(wanted) == before:
        return
    if bytewise and bytewise[0] is steps.values["pre_tokenizer"]:
        bytewise[0]["add_prefix_space"] = bool(wanted)
    elif put and not bytewise:
        steps.remove("normalizer", "Prepend")
        steps.remove("decoder", "Strip")
        for step in steps.of("pre_tokenizer", "Metaspace"):
            step["prepend_scheme"] = "never"
    else:
        yield f"add_prefix_space: {wanted} has no effect: the steps of tokenizer.json hold"
        return
    yield f"{'a' if wanted else 'no'} blank before a text, as tokenizer_config.json says, not as in tokenizer.json"


MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
LARGE = 100_000


def _apply_tekken(steps: Steps, given: VocabularySettings, size: int) -> Iterator[str]:
    """`fix_mistral_regex`: early conversions of Tekken vocabularies have another family's expression."""
    first = next(steps.of("pre_tokenizer", "Split"), None)
    if first is None or first["pattern"] == {"Regex": TEKKEN}:
        return
    if given.config.get("fix_mistral_regex"):
        first.update(pattern={"Regex": TEKKEN}, behavior="Isolated", invert=False)
        yield "fix_mistral_regex: texts are split by Tekken's expression, not by that of tokenizer.json"
    elif given.model_type in MISTRAL and size > LARGE:
        yield "tokenizer.json does not split as Tekken does, with which Mistral trains; fix_mistral_regex: true would"


def _add_tokens(backend: tokenizers.Tokenizer, given: VocabularySettings, path: Path) -> Iterator[str]:
    """Add the tokens that stand only beside tokenizer.json, each under its declared id."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    declared = {place: token for place, token in given.added.items() if repr(token) not in present}
    vocabulary = sorted(declared.items(), key=lambda item: item[0])
    backend.add_tokens([token for _, token in vocabulary])
    for place, token in vocabulary:
        if (found := backend.token_to_id(token.content)) != place:
            raise CheckpointInvalid.of(
                path, f"added_tokens_decoder[{place}]: {token.content!r} has id {found} after the tokens before it"
            )
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    left_out = []
    for token in given.named:
        if token.content in added:
            continue
        if backend.token_to_id(token.content) is None and backend.get_vocab_size() >= given.rows:
            left_out.append(token.content)
        else:
            backend.add_tokens([token])
    if declared:
        yield f"{len(declared)} added tokens as in tokenizer_config.json, not as in tokenizer.json"
    if left_out:
        yield f"tokens that the model has no row for are left out: {' '.join(left_out)}"


def _apply_ends(backend: tokenizers.Tokenizer, given: VocabularySettings, path: Path) -> Iterator[str]:
    """`add_bos_token` and `add_eos_token`, where the class of the file reads them."""
    said = {side: given.config.get(f"add_{side}_token") for side in ("bos", "eos")}
    if all(value is None for value in said.values()):
        return
    tokens = {side: given.spelled[f"{side}_token"] for side, value in said.items() if value}
    ids = {side: None if token is None else backend.token_to_id(token) for side, token in tokens.items()}
    around = [ids[side] for side in ("bos", "eos") if side in ids]
    now = backend.encode("", add_special_tokens=True).ids
    if now == around:
        return
    shown = ", ".join(f"add_{side}_token: {value}" for side, value in said.items() if value is not None)
    if given.kind not in TEMPLATED:
        yield f"{shown} has no effect: the steps of tokenizer.json hold"
        return
    missing = [side for side, token_id in ids.items() if token_id is None]
    if missing:
        raise CheckpointInvalid.of(path, f"add_{missing[0]}_token: there is no {missing[0]}_token in the vocabulary")
    set_ends(backend, tokens.get("bos"), tokens.get("eos"))
    yield f"{shown}, as {given.kind} applies it, not as in tokenizer.json"


def set_ends(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let every text begin and end with these tokens of the vocabulary."""
    before, after = [bos] if bos is not None else [], [eos] if eos is not None else []
    single, second = [*before, "$A", *after], [*before, "$B", *after]
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{piece}:1" for piece in second)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys((*before, *after))],
    )


def _other_class(backend: tokenizers.Tokenizer, kind: str) -> Iterator[str]:
    """A remark where transformers 5 splits texts by the class that the file names, and otherwise than its steps."""
    if kind not in BY_CLASS or backend.pre_tokenizer is None:
        return
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    PRE_TOKENIZERS[BY_CLASS[kind]].apply(theirs)
    if any(_pieces(backend, text) != _pieces(theirs, text) for text in HARD_TEXTS):
        yield f"texts are split by the steps of tokenizer.json; transformers 5 splits them by its class {kind}"


def _pieces(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    normal = text if backend.normalizer is None else backend.normalizer.normalize_str(text)
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
