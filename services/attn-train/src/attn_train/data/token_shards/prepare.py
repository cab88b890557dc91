"""`attn data prepare`: tokenizes files in parallel; the output is identical for any number of processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from attn_core.errors import InvalidValue
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.tokenizer import eos_id
from attn_schema.locks import exclusive
from attn_schema.prepared import PrepareConfig

from attn_train.data.conversations import read_rows
from attn_train.data.reading import Reading
from attn_train.data.shapes import needed
from attn_train.data.token_shards.encoders import ENCODERS, SHAPES, Record, affixes
from attn_train.data.token_shards.inputs import FIELD, Row, Unit, columns_of, input_files, rows_of, units_of
from attn_train.data.token_shards.shards import (
    MANIFEST,
    MASKED,
    PLAN,
    TRAIN,
    VALIDATION,
    DataManifest,
    PreparedData,
    Shard,
    ShardWriter,
    SourceFile,
    manifest_json,
    token_dtype,
    vocabulary_sha256,
    write_whole,
)
from attn_train.tasks.seq2seq import is_byte_pairs, learned_tokenizer

UNIT_BYTES = 32 << 20
"""Bytes of a file per shard; an interrupted preparation repeats at most one unfinished shard per process."""
LEARNED_FROM = 64 << 20
"""Bytes of UTF-8 text, from the beginning of the data, from which byte pairs are learned."""
AT_ONCE = 64
"""Rows that are tokenized at once."""


class DataPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a preparation, which determines its whole output."""

    kind: str
    columns: tuple[str, ...]
    skip_broken: bool
    documents: str
    tokenizer: str
    validation_fraction: float
    seed: int
    units: tuple[Unit, ...]
    files: tuple[tuple[str, int, int], ...]
    """Path, size in bytes, and modification time in ns of each file."""


class Request(NamedTuple):
    """A request to prepare data: the training files, the options, and the files of each validation set."""

    data: Sequence[str]
    config: PrepareConfig
    validation: Mapping[str, Sequence[str]] = {}
    unit_bytes: int = UNIT_BYTES


Progress = Callable[[int, int, int], None]
"""Called with the number of units done, the total, and the number of tokens of the last unit."""


class Pool(Protocol):
    """Processes units in parallel."""

    def __call__(self, folder: Path, units: Sequence[tuple[int, Unit]], workers: int) -> Iterable[list[Shard]]:
        """Yield the shards of each unit, in any order."""
        ...


def prepare(request: Request, out: Path, *, workers: int, pool: Pool, progress: Progress) -> PreparedData:
    """Prepare data in the folder `out`, resuming an interrupted call with the same request.

    Raises `InvalidValue` for data that cannot be read or a folder with other content, and `Unavailable` while another
    process prepares the same folder.
    """
    if (out / MANIFEST).is_file() and not (out / PLAN).is_file():
        raise InvalidValue.of("out", str(out), "a new folder; this one has prepared data")
    fresh = not out.exists() or all(path.name.startswith(".") for path in out.iterdir())
    if not fresh and not (out / PLAN).is_file():
        raise InvalidValue.of("out", str(out), "a new or empty folder, or that of an interrupted preparation")
    plan = plan_of(request)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        _begin(plan, out)
        dtype = token_dtype(Tokenizer.from_folder(out).vocab_size)
        units = [(number, unit) for number, unit in enumerate(plan.units) if not _is_done(out, plan, number)]
        done = len(plan.units) - len(units)
        for shards in pool(out, units, workers):
            done += 1
            progress(done, len(plan.units), sum(shard.tokens for shard in shards))
        _finish(plan, out, dtype)
    return PreparedData.open(out)


def plan_of(request: Request) -> DataPlan:
    """Return the plan of a request; raises `InvalidValue` for invalid files, columns, set names or fractions."""
    config = request.config
    sets = {TRAIN: input_files(request.data)}
    for name, given in request.validation.items():
        if not name.isidentifier() or name == TRAIN:
            raise InvalidValue.of("validation", name, f"a name of letters, digits and '_' other than {TRAIN!r}")
        sets[name] = input_files(given)
    units: list[Unit] = []
    for name, files in sets.items():
        held_out = config.validation_fraction if name == TRAIN else 0.0
        for path in files:
            _check_columns(path, config)
            units += units_of(path, name, request.unit_bytes, (_tail(path, held_out, config), VALIDATION))
    described = [(str(path), path.stat()) for files in sets.values() for path in files]
    return DataPlan(
        kind=config.kind,
        columns=config.columns,
        skip_broken=config.skip_broken,
        documents=config.documents,
        tokenizer=config.tokenizer,
        validation_fraction=config.validation_fraction,
        seed=config.seed,
        units=tuple(units),
        files=tuple((path, status.st_size, status.st_mtime_ns) for path, status in described),
    )


def _tail(path: Path, fraction: float, config: PrepareConfig) -> float:
    """Return the fraction at the end of a file to hold out: for whole texts only, as rows are drawn one by one."""
    whole = columns_of(path) is None and config.documents == "file"
    if fraction and whole and path.suffix.lower() in (".gz", ".zst"):
        allowed = "0 for a compressed text: name another file with --validation NAME=FILE, or make each line a document"
        raise InvalidValue.of("validation_fraction", fraction, allowed)
    return fraction if whole else 0.0


def _check_columns(path: Path, config: PrepareConfig) -> None:
    found = columns_of(path)
    if found is not None:
        try:
            Reading.of(config).needed_of(found, SHAPES[config.kind])
        except InvalidValue as error:
            raise InvalidValue.of(FIELD, str(path), f"rows for {config.kind}: {error.message}") from error
    elif config.kind != "text":
        allowed = f"rows with the columns {needed(SHAPES[config.kind])} for {config.kind}, not text"
        raise InvalidValue.of(FIELD, str(path), allowed)


def _reading(plan: DataPlan, unit: Unit) -> Reading:
    """Return how the rows of a unit are read; the rows of a text have no columns."""
    columns = () if unit.format == "text" else plan.columns
    return Reading.of(PrepareConfig(columns=columns, skip_broken=plan.skip_broken))


def _rows(plan: DataPlan, unit: Unit, reading: Reading) -> Iterator[Row]:
    """Yield the rows of a unit, of tables only with the columns that may be read."""
    found = columns_of(Path(unit.file)) if unit.format in ("parquet", "arrow") else None
    columns = [] if found is None else reading.needed_of(found, SHAPES[plan.kind])
    return rows_of(unit, columns, lines=True, broken=reading.broken)


def _alone(out: Path) -> Any:
    return exclusive(out / ".lock", 0.0)


def _begin(plan: DataPlan, out: Path) -> None:
    """Write the plan and the tokenizer, or check that the existing plan is the same."""
    content = msgspec.json.encode(plan)
    known = out / PLAN
    if known.is_file():
        if known.read_bytes() != content:
            allowed = "the same options and files, which continue it, or another folder"
            raise InvalidValue.of("out", f"{out}, with an interrupted preparation of another kind", allowed)
        if (out / "tokenizer.json").is_file():
            return
    tokenizer = _tokenizer(plan)
    if plan.kind == "pairs":
        eos_id(tokenizer)
    write_whole(known, content)
    for name, file in sorted(tokenizer.files().items(), reverse=True):
        write_whole(out / name, file if isinstance(file, bytes) else msgspec.json.encode(file))


def _tokenizer(plan: DataPlan) -> Tokenizer:
    if not is_byte_pairs(plan.tokenizer):
        return Tokenizer.from_folder(plan.tokenizer)
    if plan.kind in MASKED:
        raise InvalidValue.of("tokenizer", plan.tokenizer, "the tokenizer of a model, with a chat template")
    return learned_tokenizer(plan.tokenizer, list(_sample(plan)))


def _sample(plan: DataPlan) -> Iterator[str]:
    """Yield the first training texts, until they have more than `LEARNED_FROM` bytes of UTF-8."""
    size = 0
    for unit in plan.units:
        if unit.set != TRAIN:
            continue
        reading = _reading(plan, unit)
        for _, found in read_rows(_rows(plan, unit, reading), SHAPES[plan.kind], reading):
            for text in [found] if isinstance(found, str) else found:
                size += len(text.encode())
                yield text
            if size > LEARNED_FROM:
                return


def _is_done(out: Path, plan: DataPlan, number: int) -> bool:
    return all((out / f"{name}.json").is_file() for name in _names(plan, number).values())


def _names(plan: DataPlan, number: int) -> dict[str, str]:
    """Return the names of the shards of a unit, by set."""
    unit = plan.units[number]
    sets = [unit.set, VALIDATION] if _draws(plan, unit) else [unit.set]
    return {name: f"{name}-{number:05d}" for name in sets}


def _draws(plan: DataPlan, unit: Unit) -> bool:
    """Whether records of a unit are drawn at random for validation."""
    whole = unit.format == "text" and plan.documents == "file"
    return bool(plan.validation_fraction) and unit.set == TRAIN and not whole


def _finish(plan: DataPlan, out: Path, dtype: str) -> None:
    tokenizer = Tokenizer.from_folder(out)
    sets: dict[str, list[Shard]] = {}
    for number in range(len(plan.units)):
        for name, own in _names(plan, number).items():
            sets.setdefault(name, []).append(msgspec.json.decode((out / f"{own}.json").read_bytes(), type=Shard))
    if not sum(shard.tokens for shard in sets[TRAIN]):
        raise InvalidValue.of(FIELD, ", ".join(path for path, *_ in plan.files[:3]), "at least one token to train on")
    manifest = DataManifest(
        kind=plan.kind,
        tokenizer_sha256=vocabulary_sha256(tokenizer),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        columns=plan.columns,
        seed=plan.seed,
        sources=tuple(SourceFile(Path(path).name, size) for path, size, _ in plan.files),
        sets={name: tuple(shard for shard in shards if shard.tokens) for name, shards in sets.items()},
    )
    write_whole(out / MANIFEST, manifest_json(manifest))
    (out / PLAN).unlink()
    for shards in sets.values():
        for shard in shards:
            (out / f"{shard.name}.json").unlink(missing_ok=True)
            if not shard.tokens:
                for suffix in shard.files:
                    (out / f"{shard.name}.{suffix}").unlink(missing_ok=True)
    (out / ".lock").unlink(missing_ok=True)


class UnitMaker:
    """Makes the shards of units, in any process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=DataPlan)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def shards(self, number: int) -> list[Shard]:
        """Make the shards of the unit with this number."""
        plan, unit = self.plan, self.plan.units[number]
        names = _names(plan, number)
        masked = plan.kind in MASKED
        writers = {name: ShardWriter(self.folder, own, self.dtype, masked=masked) for name, own in names.items()}
        try:
            draws = _draws(plan, unit)
            place = 0
            reading = _reading(plan, unit)
            for records, ends in self._records(unit, reading):
                for record in records:
                    held_out = draws and _chance(plan.seed, number, place) < plan.validation_fraction
                    writer = writers[VALIDATION if held_out else unit.set]
                    for ids, learned in record:
                        writer.add(ids, learned, ends=ends)
                    place += 1
            notes = [dict(reading.dropped), *[dict[str, int]()] * (len(writers) - 1)]
            return [writer.close(noted) for writer, noted in zip(writers.values(), notes, strict=True)]
        except BaseException:
            for writer in writers.values():
                with suppress(OSError):
                    writer.abandon()
            raise

    def _records(self, unit: Unit, reading: Reading) -> Iterator[tuple[Iterable[Record], bool]]:
        """Yield the records of a unit, and whether their sequences end; a text's sequence ends with its last piece."""
        plan = self.plan
        if unit.format == "text" and plan.documents == "file":
            begins = unit.start == 0
            for row in rows_of(unit):
                yield [[(self._piece(row, begins=begins), None)]], row.ends
                begins = False
            return
        rows = _rows(plan, unit, reading)
        while batch := list(islice(rows, AT_ONCE)):
            yield ENCODERS[plan.kind](batch, self.tokenizer, reading), True

    def _piece(self, row: Row, *, begins: bool) -> list[int]:
        first, last = affixes(self.tokenizer)
        ids = self.tokenizer.encode(row.values["text"], add_special=False)
        return (first if begins else []) + ids + (last if row.ends else [])


def _chance(seed: int, unit: int, place: int) -> float:
    """Return a deterministic pseudo-random number in [0, 1) for a record."""
    digest = hashlib.blake2b(f"{seed}:{unit}:{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
