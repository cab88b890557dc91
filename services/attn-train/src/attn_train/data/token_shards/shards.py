"""Token shards: folders of memory-mapped token ids, with the end offsets of their sequences and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.weights.atomic_write import sync_path
from attn_models.weights.manifest import file_sha256
from numpy.typing import NDArray

MANIFEST = "data.json"
"""The manifest, which is written last: without it the preparation of a folder is not finished."""
MANIFEST_LIMIT = 64 << 20
PLAN = "plan.json"
"""The plan of an unfinished preparation; removed when it is finished."""
TRAIN, VALIDATION = "train", "validation"
FIELD = "config.data.prepared"
KINDS: Mapping[str, int] = {"text": 1, "chat": 1, "preference": 2, "pairs": 2}
"""Kinds of prepared data, and the number of sequences per record: 2 for chosen and rejected, or source and target."""
MASKED = frozenset({"chat", "preference"})
"""Kinds in which only some tokens, those of answers, are targets."""

Ids = NDArray[Any]


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size in bytes and the SHA-256, in hexadecimal, of a file of a shard."""

    size: int
    sha256: str


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shard: its name, the number of its tokens and of its sequence ends, its files by suffix, and the numbers of the
    rows that were read for it by a remark, such as why they were left out."""

    name: str
    tokens: int
    ends: int
    files: dict[str, ShardFile]
    notes: dict[str, int] = {}


class SourceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was prepared: its name and size in bytes."""

    name: str
    size: int


class DataManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest of a folder of prepared data.

    `tokenizer_sha256` is the hash of the tokenizer's vocabulary, `dtype` the type of token ids, `columns` the columns
    that were read, and `sets` the shards by set: `train` and the validation sets.
    """

    kind: str
    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    columns: tuple[str, ...]
    seed: int
    sources: tuple[SourceFile, ...]
    sets: dict[str, tuple[Shard, ...]]
    format: int = 1


def vocabulary_sha256(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer's tokens in the order of their ids; it is equal for equal vocabularies."""
    digest = hashlib.sha256()
    for place in range(tokenizer.vocab_size):
        digest.update(tokenizer.token(place).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def token_dtype(vocab_size: int) -> str:
    """Return the smallest type for token ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class ShardWriter:
    """Writes one shard piece by piece; it is complete and flushed to disk once `close` has returned."""

    def __init__(self, folder: Path, name: str, dtype: str, *, masked: bool) -> None:
        self._folder, self._name = folder, name
        self._dtypes = {"tokens": dtype, "ends": "uint64"} | ({"learned": "uint8"} if masked else {})
        self._files = {suffix: self._partial(suffix).open("wb") for suffix in self._dtypes}
        self._digests = {suffix: hashlib.sha256() for suffix in self._dtypes}
        self._sizes = dict.fromkeys(self._dtypes, 0)
        self._tokens = self._ends = 0

    def add(self, ids: Ids | Sequence[int], learned: Ids | Sequence[int] | None = None, *, ends: bool) -> None:
        """Append token ids, with flags whether each is a target; `ends` says whether the sequence ends with them."""
        self._write("tokens", ids)
        self._tokens += len(ids)
        if learned is not None:
            self._write("learned", learned)
        if ends:
            self._write("ends", [self._tokens])
            self._ends += 1

    def close(self, notes: Mapping[str, int]) -> Shard:
        """Flush the files, rename them to their final names, and write the shard's description next to them."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for suffix in self._dtypes:
            self._partial(suffix).replace(self._folder / f"{self._name}.{suffix}")
        files = {name: ShardFile(self._sizes[name], self._digests[name].hexdigest()) for name in self._dtypes}
        shard = Shard(self._name, self._tokens, self._ends, files, dict(notes))
        write_whole(self._folder / f"{self._name}.json", msgspec.json.encode(shard))
        return shard

    def abandon(self) -> None:
        """Remove the files that were written."""
        for suffix, file in self._files.items():
            file.close()
            self._partial(suffix).unlink(missing_ok=True)

    def _write(self, suffix: str, values: Ids | Sequence[int]) -> None:
        data = np.asarray(values, dtype=np.dtype(self._dtypes[suffix]).newbyteorder("<")).tobytes()
        self._files[suffix].write(data)
        self._digests[suffix].update(data)
        self._sizes[suffix] += len(data)

    def _partial(self, suffix: str) -> Path:
        return self._folder / f".{self._name}.{suffix}.partial"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically, and flush it to disk."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    sync_path(partial)
    partial.replace(path)
    sync_path(path.parent)


class Window(NamedTuple):
    """A range of tokens: their ids, flags whether each is a target (None: all), and the end offsets of sequences."""

    ids: Ids
    learned: Ids | None
    ends: Ids


@dataclass(frozen=True, eq=False)
class PreparedSet:
    """The shards of one set as a single sequence of tokens, memory-mapped from disk.

    `parts` is the number of sequences per record; `masked` says whether only some tokens are targets.
    """

    folder: Path
    shards: Sequence[Shard]
    dtype: str
    parts: int = 1
    masked: bool = False

    @cached_property
    def token_starts(self) -> NDArray[np.int64]:
        """The offset in tokens at which each shard begins, and at which the last one ends."""
        return np.cumsum([0, *(shard.tokens for shard in self.shards)], dtype=np.int64)

    @cached_property
    def sequence_starts(self) -> NDArray[np.int64]:
        """The index of the first sequence of each shard, and the total number of sequences."""
        return np.cumsum([0, *(shard.ends for shard in self.shards)], dtype=np.int64)

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return int(self.token_starts[-1])

    @property
    def records(self) -> int:
        """The number of records: documents, conversations or pairs."""
        return int(self.sequence_starts[-1]) // self.parts

    def window(self, start: int, stop: int) -> Window:
        """Return the tokens `start` to `stop`, exclusive, of the whole set."""
        pieces: list[Window] = []
        first = int(np.searchsorted(self.token_starts, start, side="right")) - 1
        for place in range(first, len(self.shards)):
            begins = int(self.token_starts[place])
            if begins >= stop:
                break
            own, until = max(start - begins, 0), min(stop - begins, self.shards[place].tokens)
            ends = self._mapped(place, "ends")
            among = slice(*np.searchsorted(ends, [own, until], side="right").tolist())
            learned = self._mapped(place, "learned")[own:until] if self.masked else None
            pieces.append(
                Window(self._mapped(place, "tokens")[own:until], learned, ends[among].astype(np.int64) + begins - start)
            )
        if len(pieces) == 1:
            return pieces[0]
        learned = (
            np.concatenate([piece.learned for piece in pieces if piece.learned is not None]) if self.masked else None
        )
        return Window(
            np.concatenate([piece.ids for piece in pieces]), learned, np.concatenate([piece.ends for piece in pieces])
        )

    def record(self, number: int) -> list[Window]:
        """Return the sequences of a record, each as a window."""
        found = []
        for sequence in range(number * self.parts, (number + 1) * self.parts):
            place = int(np.searchsorted(self.sequence_starts, sequence, side="right")) - 1
            ends, own = self._mapped(place, "ends"), sequence - int(self.sequence_starts[place])
            start, stop = (int(ends[own - 1]) if own else 0), int(ends[own])
            learned = self._mapped(place, "learned")[start:stop] if self.masked else None
            found.append(Window(self._mapped(place, "tokens")[start:stop], learned, np.array([stop - start])))
        return found

    def lengths(self) -> Iterator[NDArray[np.int64]]:
        """Yield the lengths of all sequences, one array per shard."""
        for place in range(len(self.shards)):
            ends = self._mapped(place, "ends").astype(np.int64)
            yield ends - np.concatenate([[0], ends[:-1]])

    def _mapped(self, place: int, suffix: str) -> Ids:
        known = self._maps.get((place, suffix))
        if known is None:
            shard = self.shards[place]
            dtype = {"tokens": self.dtype, "ends": "uint64", "learned": "uint8"}[suffix]
            kind = np.dtype(dtype).newbyteorder("<")
            path = self.folder / f"{shard.name}.{suffix}"
            known = np.memmap(path, kind, mode="r") if shard.files[suffix].size else np.empty(0, kind)
            self._maps[place, suffix] = known
        return known

    @cached_property
    def _maps(self) -> dict[tuple[int, str], Ids]:
        return {}


@dataclass(frozen=True, eq=False)
class PreparedData:
    """An opened folder of prepared data: its manifest and its sets."""

    folder: Path
    manifest: DataManifest

    @classmethod
    def open(cls, folder: Path, *, verify: bool = False) -> PreparedData:
        """Open a folder, checking the sizes of its files; with `verify`, their SHA-256 is checked, too.

        Raises `InvalidValue` for a folder that is not prepared data, not finished or damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            unfinished = (folder / PLAN).is_file()
            given = f"{folder}, which is not finished" if unfinished else str(folder)
            allowed = (
                "finished data: repeat its `attn data prepare`"
                if unfinished
                else "a folder made by `attn data prepare`"
            )
            raise InvalidValue.of(FIELD, given, allowed)
        if path.stat().st_size > MANIFEST_LIMIT:
            raise InvalidValue.of(FIELD, str(path), f"a manifest of at most {MANIFEST_LIMIT} bytes")
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=DataManifest)
        except msgspec.MsgspecError as error:
            raise InvalidValue.of(FIELD, str(path), f"a manifest of `attn data prepare`: {error}") from error
        if manifest.kind not in KINDS or manifest.dtype not in ("uint16", "uint32") or manifest.format != 1:
            raise InvalidValue.of(FIELD, str(path), "a manifest of format 1, of a known kind and element type")
        opened = cls(folder, manifest)
        opened._check(verify=verify)
        return opened

    @property
    def kind(self) -> str:
        """The kind of data, one of `KINDS`."""
        return self.manifest.kind

    @property
    def validation_sets(self) -> list[str]:
        """The names of the validation sets."""
        return sorted(name for name in self.manifest.sets if name != TRAIN)

    def set(self, name: str) -> PreparedSet:
        """Return the set of this name, which is empty if it does not exist."""
        shards = self.manifest.sets.get(name, ())
        return PreparedSet(self.folder, shards, self.manifest.dtype, KINDS[self.kind], self.kind in MASKED)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, loaded from the same folder."""
        return Tokenizer.from_folder(self.folder)

    def _check(self, *, verify: bool) -> None:
        for shard in (shard for shards in self.manifest.sets.values() for shard in shards):
            if Path(shard.name).name != shard.name:
                raise InvalidValue.of(FIELD, shard.name, "shard names without a folder")
            for suffix, file in shard.files.items():
                path = self.folder / f"{shard.name}.{suffix}"
                size = path.stat().st_size if path.is_file() else None
                if size != file.size:
                    found = "is missing" if size is None else f"has {size} bytes"
                    raise InvalidValue.of(
                        FIELD, f"{path}, which {found}", f"{file.size} bytes, the size in its manifest"
                    )
                if verify and file_sha256(path) != file.sha256:
                    raise InvalidValue.of(
                        FIELD, f"{path}, which was modified", "a file with the SHA-256 in its manifest"
                    )


def manifest_json(manifest: DataManifest) -> bytes:
    """Return a manifest as indented JSON."""
    return json.dumps(msgspec.to_builtins(manifest), indent=1).encode() + b"\n"
