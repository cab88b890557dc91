"""Input files: text, JSON, CSV, Parquet and Arrow, divided into units that are read in parallel."""

from __future__ import annotations

import codecs
import csv
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from attn_core.errors import InvalidValue, MissingPackage
from attn_schema import text_files

FIELD = "data"
FORMATS: Mapping[str, str] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""File formats by suffix."""
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
"""Suffixes of compressed files, allowed after those of text, JSON and CSV."""
ALLOWED = f"files that end with {', '.join(FORMATS)}, all but the last two also with {' or '.join(COMPRESSED)}"
ABOUT = ("dataset_info.json", "dataset_dict.json", "dataset_infos.json", "state.json")
"""Files of a saved Hugging Face dataset that tell of the data."""
NAMED = 5
"""The number of files that are named in a message."""
PIECE = 1 << 16
"""Bytes of a text that are tokenized together, rounded up to whole lines."""
LONGEST_LINE = 16 << 20
"""Maximum bytes of a line of JSON; text without line ends is cut at this length, between characters."""
ROWS = 256
"""Rows of a table that are read at once."""


class Unit(msgspec.Struct, frozen=True):
    """The part of a file that becomes one shard: bytes `start` to `stop` of text and JSON lines, row groups of Parquet.

    A `stop` of -1 means the whole of a file that can only be read sequentially. `last`: it is the file's last unit.
    """

    file: str
    format: str
    start: int
    stop: int
    last: bool
    set: str


Broken = Callable[[InvalidValue], None]
"""Called with the error of a row that cannot be read."""


def refuse(error: InvalidValue) -> None:
    """Raise the error."""
    raise error


class Row(NamedTuple):
    """A row to tokenize: its columns, its place for error messages, and whether the record ends with it."""

    values: Mapping[str, Any]
    place: str
    ends: bool = True


def format_of(path: Path) -> str:
    """Return the format of a file; raises `InvalidValue` for an unknown suffix."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    known = FORMATS.get(Path(name).suffix)
    if known is None or (known in ("parquet", "arrow") and name != path.name.lower()):
        raise InvalidValue.of(FIELD, str(path), ALLOWED)
    return known


def has_rows(path: Path, *, headed: bool = True) -> bool:
    """Whether a file, or one below a folder, has rows with columns, by its name; without `headed`, columns that are
    separated by tabs have no names, and are none."""
    files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file() and _is_known(file)]
    return any(format_of(file) != "text" and (headed or ".tsv" not in file.suffixes) for file in files)


def input_files(given: Sequence[str]) -> list[Path]:
    """Return the files that paths, folders and glob patterns match; the files of each are sorted.

    A folder matches all files below it that have a known format; texts beside files of rows, such as a README, are no
    data, nor are the files of a saved dataset that tell of it. Raises `InvalidValue` for an argument that matches no
    file, and for empty files.
    """
    found: list[Path] = []
    for text in given:
        path = Path(text).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and _is_known(file))
            files = [file for file in files if format_of(file) != "text"] or files
        elif any(mark in text for mark in "*?["):
            anchor = Path(path.anchor) if path.is_absolute() else Path()
            files = sorted(file for file in anchor.glob(str(path.relative_to(path.anchor))) if file.is_file())
        else:
            files = [path] if path.is_file() else []
        if not files:
            raise InvalidValue.of(FIELD, text, f"{ALLOWED}; or a folder or pattern of such files")
        found += files
    for file in found:
        format_of(file)
        if not file.stat().st_size:
            raise InvalidValue.of(FIELD, str(file), "a file that is not empty")
    return list(dict.fromkeys(file.absolute() for file in found))


SPLITS: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval"),
    "test": ("test", "testing"),
}
"""Splits of published data, by words in the names of their files and folders."""


def split_files(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Return files below a folder by their `SPLITS`; if none is named as training, all are for training."""
    found: dict[str, list[Path]] = {name: [] for name in SPLITS}
    for file in files:
        words = set(re.findall("[a-z]+", str(file.absolute().relative_to(folder.absolute())).lower()))
        for name in [name for name, known in SPLITS.items() if words.intersection(known)][:1]:
            found[name].append(file)
    return found if found["train"] else {"train": list(files), "validation": [], "test": []}


def unread(folder: Path, files: Sequence[Path]) -> str:
    """Return the names of the files of a folder that are not read, as text; empty if there are none."""
    known, every = (
        set(files),
        (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".")),
    )
    names = [file.name for file in every if file.absolute() not in known and file.name not in ABOUT]
    some = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return f", files left aside: {some}" if names else ""


def _is_known(path: Path) -> bool:
    try:
        format_of(path)
    except InvalidValue:
        return False
    cached = path.name.startswith("cache-") and path.suffix == ".arrow"  # of what was computed of a saved dataset
    return not path.name.startswith(".") and path.name not in ABOUT and not cached


def units_of(path: Path, set_name: str, unit_bytes: int, held_out: tuple[float, str] = (0.0, "")) -> Iterator[Unit]:
    """Yield a file's units of about `unit_bytes` each; the fraction `held_out[0]` at its end is for the set
    `held_out[1]`."""
    kind = format_of(path)
    if kind == "parquet":
        yield from _row_groups(path, set_name, unit_bytes)
    elif kind in ("arrow", "csv", "json") or path.suffix.lower() in COMPRESSED:
        yield Unit(str(path), kind, 0, -1, last=True, set=set_name)
    else:
        size = path.stat().st_size
        with path.open("rb") as file:
            cut = _aligned(file, int(size * (1 - held_out[0])), size) if held_out[0] else size
            for start, stop, name in ((0, cut, set_name), (cut, size, held_out[1])):
                if start == stop:
                    continue
                marks = [start]
                while marks[-1] < stop:
                    marks.append(min(_aligned(file, marks[-1] + unit_bytes, stop), stop))
                for one, other in pairwise(marks):
                    yield Unit(str(path), kind, one, other, last=other == stop, set=name)


def _aligned(file: BinaryIO, place: int, size: int) -> int:
    """Return the end of the line that contains the byte before `place`; in a line without an end, of the character."""
    if place >= size:
        return size
    file.seek(place - 1)
    line = file.readline(LONGEST_LINE)
    if line.endswith(b"\n") or len(line) < LONGEST_LINE:
        return place - 1 + len(line)
    file.seek(place)
    rest = file.read(4)
    return place + next((at for at, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))


def _row_groups(path: Path, set_name: str, unit_bytes: int) -> Iterator[Unit]:
    with _table(path) as file:
        sizes = [file.metadata.row_group(place).total_byte_size for place in range(file.num_row_groups)]
    if not sizes:
        raise InvalidValue.of(FIELD, str(path), "a Parquet file with rows")
    start, total = 0, 0
    for place, size in enumerate(sizes):
        total += size
        last = place + 1 == len(sizes)
        if total >= unit_bytes or last:
            yield Unit(str(path), "parquet", start, place + 1, last=last, set=set_name)
            start, total = place + 1, 0


def columns_of(path: Path) -> list[str] | None:
    """Return the columns of a file, from its schema or first row; None for text.

    Raises `InvalidValue` for a file that cannot be read.
    """
    kind = format_of(path)
    if kind == "text":
        for _ in rows_of(Unit(str(path), kind, 0, min(path.stat().st_size, PIECE), last=False, set="")):
            break
        return None
    if kind == "parquet":
        with _table(path) as file:
            return list(file.schema_arrow.names)
    for row in rows_of(Unit(str(path), kind, 0, -1, last=True, set="")):
        return list(row.values)
    raise InvalidValue.of(FIELD, str(path), "a file with rows")


def rows_of(unit: Unit, columns: Sequence[str] = (), *, lines: bool = False, broken: Broken = refuse) -> Iterator[Row]:
    """Yield the rows of a unit; those of a text are {"text": ...}, in pieces or, with `lines`, line by line.

    Raises `InvalidValue`, which names the file and the line, for content that cannot be read; for a line of JSON or a
    row of a table, `broken` is called with this error, and if it returns, the row is left out.
    """
    path = Path(unit.file)
    with _reading(path):
        if unit.format == "parquet":
            yield from _parquet_rows(path, unit, columns)
        elif unit.format == "arrow":
            yield from _arrow_rows(path, columns)
        elif unit.format == "jsonl":
            yield from _json_rows(path, unit, broken)
        elif unit.format == "json":
            yield from _json_array(path, unit, broken)
        elif unit.format == "csv":
            yield from _csv_rows(path, broken)
        else:
            yield from (_text_lines if lines else _text_pieces)(path, unit)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A context in which errors of files that are damaged or cut off become `InvalidValue` with the file's path."""
    try:
        yield
    except UnicodeDecodeError as error:
        with _opened(path) as file:
            text_files.require_utf8(file.read, path, FIELD)
        allowed = "UTF-8 text without zero bytes; the file is binary or has another encoding"
        raise InvalidValue.of(
            FIELD, f"{path} with the bytes {error.object[error.start : error.start + 4]!r}", allowed
        ) from error
    except Exception as error:
        if not isinstance(error, OSError | EOFError | lzma.LZMAError) and not type(error).__module__.startswith(
            "pyarrow"
        ):
            raise
        why = " ".join(str(error).split())[:200]
        raise InvalidValue.of(FIELD, str(path), f"a complete, readable file ({why})") from error


def require_utf8(path: Path, field: str, *, skip_broken: bool) -> None:
    """Raise `InvalidValue`, with the line and byte, for a file of text, JSON or CSV that is not UTF-8; lines of JSON
    that are skipped if they are broken may be anything."""
    kind = format_of(path)
    if kind in ("text", "csv", "json") or (kind == "jsonl" and not skip_broken):
        with _reading(path), _opened(path) as file:
            text_files.require_utf8(file.read, path, field)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Give the content of a file, unpacked if it is compressed; reading one that was cut off raises `OSError`."""
    if path.suffix.lower() not in COMPRESSED:
        with path.open("rb") as file:
            yield file
        return
    if path.suffix.lower() == ".xz":
        with lzma.open(path) as xz:
            yield xz  # type: ignore[misc]
        return
    with _arrow().input_stream(str(path)) as unpacked, io.BufferedReader(unpacked, buffer_size=1 << 20) as file:
        yield file


def _lines(path: Path, unit: Unit) -> Iterator[tuple[int, bytes]]:
    """Yield the byte offset of each line of a unit, and the line."""
    with _opened(path) as file:
        if unit.start:
            file.seek(unit.start)
        at, rest = unit.start, b""
        while unit.stop < 0 or at < unit.stop:
            max_bytes = LONGEST_LINE if unit.stop < 0 else min(LONGEST_LINE, unit.stop - at)
            line = rest + file.readline(max_bytes - len(rest))
            if not line:
                return
            # A line that is too long is cut between two characters.
            cut = len(line) if line.endswith(b"\n") or len(line) < LONGEST_LINE else _character_end(line)
            line, rest = line[:cut], line[cut:]
            yield at, line if at else line.removeprefix(codecs.BOM_UTF8)
            at += len(line)


def _character_end(data: bytes) -> int:
    """Return the last offset in UTF-8 data at which a character begins."""
    return next((at for at in range(len(data) - 1, len(data) - 5, -1) if data[at] & 0xC0 != 0x80), len(data))


def _json_rows(path: Path, unit: Unit, broken: Broken) -> Iterator[Row]:
    for number, (at, line) in enumerate(_lines(path, unit), start=1):
        place = f"{path}, the line at byte {at}" if unit.start else f"{path}, line {number}"
        if len(line) >= LONGEST_LINE - 4:
            raise InvalidValue.of(FIELD, place, f"lines of at most {LONGEST_LINE} bytes")
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8"))
        except ValueError as error:
            why = f"{error.msg}, at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            broken(InvalidValue.of(FIELD, place, f"JSON in UTF-8: {why}"))
            continue
        if isinstance(values, dict):
            yield Row(values, place)
        else:
            broken(InvalidValue.of(FIELD, place, "an object with columns"))


def _json_array(path: Path, unit: Unit, broken: Broken) -> Iterator[Row]:
    """Yield the objects of an array, or of lines as in JSON lines if the file does not begin with a bracket."""
    with _opened(path) as file:
        if not file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _json_rows(path, unit, broken)
            return
    with _opened(path) as file:
        try:
            rows = json.loads(file.read().decode("utf-8-sig"))
        except ValueError as error:
            if isinstance(error, UnicodeDecodeError):
                raise
            raise InvalidValue.of(FIELD, str(path), f"JSON: {error}") from error
    for number, values in enumerate(rows, start=1):
        if isinstance(values, dict):
            yield Row(values, f"{path}, item {number}")
        else:
            broken(InvalidValue.of(FIELD, f"{path}, item {number}", "an object with columns"))


def _csv_rows(path: Path, broken: Broken) -> Iterator[Row]:
    """Yield the rows of a table with a line of column names; every value is the text that was written."""
    csv.field_size_limit(LONGEST_LINE)
    separator = "\t" if ".tsv" in path.suffixes else ","
    with _opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        reader = csv.DictReader(text, delimiter=separator, strict=True)
        try:
            for values in reader:
                place = f"{path}, line {reader.line_num}"
                if None in values or None in values.values():
                    allowed = f"{len(reader.fieldnames or ())} columns, as in the first line"
                    broken(InvalidValue.of(FIELD, place, allowed))
                else:
                    yield Row(values, place)
        except csv.Error as error:
            raise InvalidValue.of(FIELD, f"{path}, line {reader.line_num + 1}", f"a table: {error}") from error


def _text_lines(path: Path, unit: Unit) -> Iterator[Row]:
    for at, line in _lines(path, unit):
        text = _decoded(line).strip("\n")
        if text.strip():
            yield Row({"text": text}, f"{path}, the line at byte {at}")


def _text_pieces(path: Path, unit: Unit) -> Iterator[Row]:
    """Yield the text in pieces of whole lines; the last piece of the file's last unit ends the document."""
    lines: list[bytes] = []
    size, begins = 0, unit.start
    waiting: Row | None = None
    for at, line in _lines(path, unit):
        if not lines:
            begins = at
        lines.append(line)
        size += len(line)
        if size >= PIECE:
            if waiting is not None:
                yield waiting
            waiting = Row({"text": _decoded(b"".join(lines))}, f"{path}, byte {begins}", ends=False)
            lines, size = [], 0
    if lines:
        if waiting is not None:
            yield waiting
        waiting = Row({"text": _decoded(b"".join(lines))}, f"{path}, byte {begins}", ends=False)
    if waiting is not None:
        yield waiting._replace(ends=unit.last)


def _decoded(data: bytes) -> str:
    if b"\0" in data:
        at = data.index(b"\0")
        raise UnicodeDecodeError("utf-8", data, at, at + 1, "a zero byte")
    return data.decode("utf-8").replace("\r\n", "\n")


def _arrow() -> Any:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingPackage.of("attn-train[data]", "reading Parquet, Arrow and compressed files") from error
    return pa


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    _arrow()
    from pyarrow import parquet

    with _reading(path), parquet.ParquetFile(path, memory_map=True) as file:
        yield file


def _parquet_rows(path: Path, unit: Unit, columns: Sequence[str]) -> Iterator[Row]:
    with _table(path) as file:
        for group in range(unit.start, unit.stop):
            number = 0
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=list(columns) or None):
                for values in _values(batch):
                    yield Row(values, f"{path}, row {number} of row group {group}")
                    number += 1


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch of a table. Objects lose their nulls: where those of several rows have other keys, a
    table has all keys in each of them."""
    nested = [field.name for field in batch.schema if "struct<" in str(field.type)]
    for values in batch.to_pylist():
        yield values | {name: _without_nulls(values[name]) for name in nested}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value] if isinstance(value, list) else value


def _arrow_rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    arrow, number = _arrow(), 0
    with arrow.memory_map(str(path)) as file, _arrow_batches(arrow, file) as batches:
        for batch in batches:
            wanted = batch.select([name for name in columns if name in batch.schema.names]) if columns else batch
            for start in range(0, wanted.num_rows, ROWS):
                for values in _values(wanted.slice(start, ROWS)):
                    yield Row(values, f"{path}, row {number}")
                    number += 1


@contextmanager
def _arrow_batches(arrow: Any, file: Any) -> Iterator[Iterator[Any]]:
    """Give the record batches of an Arrow stream, the format of saved Hugging Face datasets, or of an Arrow file."""
    if file.read(6) == b"ARROW1":
        reader = arrow.ipc.open_file(file)
        yield (reader.get_batch(place) for place in range(reader.num_record_batches))
    else:
        file.seek(0)
        with arrow.ipc.open_stream(file) as stream:
            yield iter(stream)
