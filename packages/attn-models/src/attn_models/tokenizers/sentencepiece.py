"""Tokenizers from SentencePiece's own files (`tokenizer.model`), for folders without a tokenizer.json.

The file says how texts are split; every backend that is made of one is compared with SentencePiece itself. A blank is
put in front of every piece between special tokens, as by the models' own code, whatever `legacy` says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from attn_core.errors import CheckpointInvalid, Incompatible, MissingPackage
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from attn_models.tokenizers.applied import HARD_TEXTS, set_ends
from attn_models.tokenizers.settings import VocabularySettings
from attn_models.tokenizers.vocabulary import BLANK, LibraryErrors, ranked_merges

BEGINS, ENDS_TEXT = (True, False), (False, True)
ENDS = {"": BEGINS, "LlamaTokenizer": BEGINS, "GemmaTokenizer": BEGINS, "T5Tokenizer": ENDS_TEXT}
"""Whether texts begin and end with special tokens, by the class of tokenizer_config.json, where that does not say.

These are the classes whose ids are those of the file; others, such as XLMRobertaTokenizer, number them anew.
"""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
UNIGRAM, BPE = 1, 2
MARK = re.compile(r"<.+>|\[.+\]")
"""Symbols of the user that are no part of ordinary texts; as behind special tokens, a blank is put behind them."""
NEVER = -1e9
"""A score with which a piece is never chosen."""


def sentencepiece_backend(path: Path, given: VocabularySettings) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The backend of a SentencePiece file, with the ends of the class in `given`, and its special tokens by name.

    Raises `MissingPackage` without `sentencepiece` and `protobuf`, `Incompatible` for classes and rules that are not
    supported, `CheckpointInvalid` for a file that is none, or whose texts would be split otherwise than by
    SentencePiece.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
    except ImportError as error:
        raise MissingPackage.of("sentencepiece and protobuf", f"reading {path.name}") from error
    if given.kind not in ENDS:
        rule = f"tokenizer_class: {given.kind!r} numbers the pieces of {path.name} anew, which is not supported"
        raise Incompatible(f"{path}: {rule}; supported: {', '.join(filter(None, ENDS))}, and a tokenizer.json of any")
    messages: Any = sentencepiece_model_pb2
    file = messages.ModelProto()
    try:
        file.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise CheckpointInvalid.of(path, "is no SentencePiece file") from error
    _require_supported(file, path)
    with LibraryErrors(lambda said: CheckpointInvalid.of(path, f"not a tokenizer: {said}")):
        backend = _backend(file)
        theirs = SentencePieceProcessor(model_proto=file.SerializeToString())
        own = [p.piece for p in file.pieces if p.type == USER_DEFINED and not MARK.fullmatch(p.piece)]
        for text in (*HARD_TEXTS, *(f"  {text}  " for text in HARD_TEXTS), *(f"a{piece}b" for piece in own)):
            if backend.encode(text, add_special_tokens=False).ids != theirs.encode(text):
                raise CheckpointInvalid.of(path, f"would split {text!r} otherwise than SentencePiece")
    ids = {name: getattr(file.trainer_spec, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    found = {name: file.pieces[place].piece for name, place in ids.items() if 0 <= place < len(file.pieces)}
    usual = dict(zip(("bos", "eos"), ENDS[given.kind], strict=True))
    wanted = [found.get(side) if given.config.get(f"add_{side}_token", usual[side]) else None for side in usual]
    set_ends(backend, *wanted)
    return backend, {f"{name}_token": piece for name, piece in found.items()}


def _require_supported(file: Any, path: Path) -> None:
    kind, rules = file.trainer_spec.model_type, file.normalizer_spec
    refused = {
        "model_type": kind not in (UNIGRAM, BPE),
        "treat_whitespace_as_suffix": file.trainer_spec.treat_whitespace_as_suffix,
        "escape_whitespaces": not rules.escape_whitespaces,
        "denormalizer_spec": bool(file.denormalizer_spec.precompiled_charsmap),
    }
    for name, bad in refused.items():
        if bad:
            raise Incompatible(f"{path}: this value of {name} is not supported; publish a tokenizer.json with it")
    if len({piece.piece for piece in file.pieces}) != len(file.pieces):
        raise CheckpointInvalid.of(path, "a piece of the vocabulary is given twice")


def _backend(file: Any) -> tokenizers.Tokenizer:
    rules, pieces = file.normalizer_spec, list(file.pieces)
    backend = pieces_backend(
        pieces,
        unigram=file.trainer_spec.model_type == UNIGRAM,
        charsmap=rules.precompiled_charsmap,
        strips=rules.remove_extra_whitespaces,
        prefixed=rules.add_dummy_prefix,
    )
    special = {CONTROL: True, UNKNOWN: True, USER_DEFINED: False}
    backend.add_tokens(
        [
            AddedToken(piece.piece, normalized=BLANK in piece.piece, special=special[piece.type])
            for piece in pieces
            if piece.type in special
        ]
    )
    return backend


class Piece(NamedTuple):
    """A piece of a SentencePiece vocabulary, with its score and its type, `NORMAL` to `BYTE`."""

    piece: str
    score: float
    type: int


def pieces_backend(
    pieces: Sequence[Piece], *, unigram: bool, charsmap: bytes, strips: bool, prefixed: bool
) -> tokenizers.Tokenizer:
    """The backend of a SentencePiece vocabulary in the order of its ids: BPE (Kudo and Richardson 2018, arXiv
    1808.06226), or a `unigram` model (Kudo 2018, arXiv 1804.10959).

    Texts are normalised by a compiled `charsmap`, if it is not empty; `strips` leaves one of several blanks and none at
    the ends, `prefixed` puts one in front. Blanks are written as U+2581.
    """
    backend = tokenizers.Tokenizer(_unigram(pieces) if unigram else _bpe(pieces))
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if strips:
        steps += [normalizers.Replace(Regex(found), put) for found, put in ((r"\A +| +\z", ""), (" {2,}", " "))]
    if prefixed:
        steps.append(normalizers.Prepend(BLANK))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", BLANK)])
    spelled: list[Any] = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*spelled, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return backend


def _bpe(pieces: Sequence[Piece]) -> models.BPE:
    ranked = [place for place, piece in enumerate(pieces) if piece.type in (NORMAL, USER_DEFINED)]
    ranked.sort(key=lambda place: -pieces[place].score)
    return models.BPE(
        vocab={piece.piece: place for place, piece in enumerate(pieces)},
        merges=list(ranked_merges({pieces[place].piece: place for place in ranked})),
        unk_token=next((piece.piece for piece in pieces if piece.type == UNKNOWN), None),
        fuse_unk=True,
        byte_fallback=any(piece.type == BYTE for piece in pieces),
    )


def _unigram(pieces: Sequence[Piece]) -> models.Unigram:
    scores = [(piece.piece, NEVER if piece.type == UNUSED else piece.score) for piece in pieces]
    unknown = next((place for place, piece in enumerate(pieces) if piece.type == UNKNOWN), None)
    return models.Unigram(scores, unk_id=unknown, byte_fallback=any(piece.type == BYTE for piece in pieces))
