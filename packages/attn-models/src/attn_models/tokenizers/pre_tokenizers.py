"""How byte-level tokenizers split a text before merging, by `tokenizer.ggml.pre`, which a GGUF file stores instead.

Each entry has the steps of the `tokenizer.json` of the models it is named after, with its normalization, as the models
were trained; the names and flags are those of llama.cpp (`src/llama-vocab.cpp`, `conversion/base.py`), whose own
expressions differ: its `gpt-4o` splits at combining marks, and it never composes accents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from attn_core.errors import InvalidValue, UnknownName
from tokenizers import Regex, normalizers, pre_tokenizers

from attn_models.tokenizers.vocabulary import byte_of_character

Step = str | pre_tokenizers.PreTokenizer
"""A regular expression (Oniguruma) whose matches become pieces of their own, or a step of the library."""

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = (pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),)
DIGIT = pre_tokenizers.Digits(individual_digits=True)
DIGITS_GPT2 = (DIGIT, *GPT2)

ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
CL100K = rf"{ENDINGS}|{WORD}|\p{{N}}{{1,3}}|{SYMBOLS}|{BLANKS}"
QWEN2 = rf"{ENDINGS}|{WORD}|\p{{N}}|{SYMBOLS}|{BLANKS}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(upper: str, lower: str, ending: str) -> str:
    """Words that begin with capitals or continue in lower case, each with an `ending`."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


SLASHED = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
O200K = rf"{_cased(UPPER, LOWER, f'{ENDINGS}?')}|\p{{N}}{{1,3}}|{SLASHED}"
TEKKEN = rf"{_cased(UPPER, LOWER, '')}|\p{{N}}|{SLASHED}"
KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
ASCII_SYMBOLS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
MARKED = rf"{ASCII_SYMBOLS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}"
DEEPSEEK_3 = (r"\p{N}{1,3}", KANA, MARKED.replace(r"\r\n", "\r\n"))  # spelled as published, to be found again
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
HAN_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
DEEPSEEK_LLM = (
    *("[\r\n]", rf"\s?[{CASED_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e‘-‟\u3000-。]+", r"\s+$"),
    *(HAN_AND_HANGUL, DIGIT),
)
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, DIGIT)
FALCON = (
    *(pre_tokenizers.Punctuation(behavior="contiguous"), *GPT2),
    *(pre_tokenizers.Digits(individual_digits=False), "[0-9][0-9][0-9]"),
)
SENTENCES = " ?[^(\\s|.,!?…。，、।۔،)]+"
NOT_HAN = r"&&[^\p{Han}]]"
KIMI_WORDS = _cased(f"[{UPPER}{NOT_HAN}", f"[{LOWER}{NOT_HAN}", f"{ENDINGS}?")
KIMI = rf"[\p{{Han}}]+|{KIMI_WORDS}|\p{{N}}{{1,3}}|{SYMBOLS}|{BLANKS}"

QWEN35 = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
)
BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
EXAONE_MOE = (
    rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class BytePreTokenizer:
    """The `steps` that split a text, before which accents may be composed (`nfc`).

    A piece that is a token becomes it at once with `ignore_merges`, whatever its merges. `begins` says whether texts
    begin with the beginning token where a file does not say.
    """

    steps: tuple[Step, ...]
    nfc: bool = False
    ignore_merges: bool = False
    begins: bool = False

    def apply(self, backend: tokenizers.Tokenizer) -> None:
        """Set the steps of a backend with byte-level BPE."""
        steps = [pre_tokenizers.Split(Regex(s), "isolated") if isinstance(s, str) else s for s in self.steps]
        own = any(isinstance(step, pre_tokenizers.ByteLevel) for step in steps)
        steps = steps if own else [*steps, BYTES]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        if self.nfc:
            backend.normalizer = normalizers.NFC()
        if self.ignore_merges:
            backend.model.ignore_merges = True


def _named(names: str, entry: BytePreTokenizer) -> Iterable[tuple[str, BytePreTokenizer]]:
    return ((name, entry) for name in names.split())


Bytes = BytePreTokenizer
PRE_TOKENIZERS: dict[str, BytePreTokenizer] = dict(
    [
        *_named("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling", Bytes(GPT2)),
        *_named("mpt olmo modern-bert", Bytes(GPT2, nfc=True)),
        *_named("starcoder refact smollm codeshell exaone minerva-7b mellum2", Bytes(DIGITS_GPT2)),
        *_named("command-r", Bytes(DIGITS_GPT2, nfc=True)),
        *_named(
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            Bytes((CL100K,), ignore_merges=True, begins=True),
        ),
        *_named("dbrx smaug-bpe chatglm-bpe", Bytes((CL100K,))),
        *_named("glm4 glm5", Bytes((CL100K,), ignore_merges=True)),
        *_named("qwen2 deepseek-r1-qwen megrez kormo f2llmv2", Bytes((QWEN2,), nfc=True)),
        *_named("stablelm2 hunyuan solar-open grok-2", Bytes((QWEN2,))),
        *_named("gpt-4o llama4 kanana2 talkie minimax-m2", Bytes((O200K,))),
        *_named("tekken", Bytes((TEKKEN,), ignore_merges=True, begins=True)),
        *_named("deepseek-llm", Bytes(DEEPSEEK_LLM)),
        *_named("deepseek-coder", Bytes(DEEPSEEK_CODER)),
        *_named("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Bytes(DEEPSEEK_3)),
        *_named("falcon", Bytes(FALCON)),
        *_named("bloom gpt3-finnish poro-chat", Bytes((SENTENCES,))),
        *_named("viking", Bytes((SENTENCES, DIGIT))),
        *_named("kimi-k2", Bytes((KIMI,))),
        *_named("qwen35", Bytes((QWEN35,), nfc=True)),
        *_named("bailingmoe bailingmoe2 llada-moe", Bytes((BAILING,))),
        *_named("seed-coder", Bytes((rf"{ENDINGS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}",))),
        *_named("tiny_aya cohere2moe", Bytes((r"\d{1,3}(?=(?:\d{3})*\b)", O200K))),
        *_named("minicpm5", Bytes((r"\p{N}{1,3}", CL100K.replace("{1,3}", "+")), ignore_merges=True)),
        *_named("laguna", Bytes((r"[^\n]+|[\n]+", QWEN2))),
        *_named("exaone-moe", Bytes((EXAONE_MOE,))),
    ]
)
"""The pre-tokenizers by `tokenizer.ggml.pre`."""


def pre_tokenizer_named(name: str) -> BytePreTokenizer:
    """The pre-tokenizer of a file; raises `UnknownName` with near names."""
    if name not in PRE_TOKENIZERS:
        raise UnknownName.of("GGUF pre-tokenizer (tokenizer.ggml.pre)", name, PRE_TOKENIZERS)
    return PRE_TOKENIZERS[name]


LONGEST = 256
"""The longest token of a vocabulary of longest matches, in bytes; those of RWKV have up to 128."""
UNMATCHED = "<no such token>"
"""A name that the library needs, which is not in the vocabulary: every text consists of tokens."""
Trie = dict[str, Any]


def longest_match_backend(tokens: Mapping[bytes, int], named: Mapping[str, int]) -> tokenizers.Tokenizer:
    """A backend that takes, at each byte of a text, the longest token that fits, as RWKV's; every byte is a token.

    The tokens are a regular expression of nested prefixes; `named` ones are in no text. Raises `InvalidValue` for a
    token of no or too many bytes.
    """
    spelled_as = {byte: character for character, byte in byte_of_character().items()}
    root, vocabulary = Trie(), dict(named)
    for token, place in tokens.items():
        if not 0 < len(token) <= LONGEST:
            raise InvalidValue.of("tokens", f"a token of {len(token)} bytes", f"1 to {LONGEST} bytes")
        spelled = "".join(spelled_as[byte] for byte in token)
        vocabulary[spelled] = place
        node = root
        for character in spelled:
            node = node.setdefault(character, {})
        node[END] = {}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, UNMATCHED))
    backend.pre_tokenizer = pre_tokenizers.Sequence([BYTES, pre_tokenizers.Split(Regex(_nested(root)), "isolated")])
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


END = ""
"""The key of a node at which a token ends."""


def _nested(node: Trie) -> str:
    """A regular expression of the longest token below a node; its branches begin with different characters."""
    leaves = "".join(re.escape(one) for one, below in node.items() if one and below == {END: {}})
    branches = [re.escape(one) + _nested(below) for one, below in node.items() if one and below != {END: {}}]
    if leaves:
        branches.append(f"[{leaves}]")
    return f"(?:{'|'.join(branches)}){'?' if END in node else ''}"
