"""Text that people and programs give: lines, UTF-8 files, and the files of a folder.

Whatever reads lines of given text reads them by these functions. A line ends with a line feed, a carriage return, or
both, as in Python's own files. `str.splitlines` would also end it at characters that are part of the text, such as
U+2028, U+2029 and U+0085, which JSON does not escape.
"""

from __future__ import annotations

import codecs
import gzip
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from attn_core.errors import InvalidValue

MARK = "\ufeff"
"""The byte order mark, with which some programs begin a file; it is no part of the text."""
UTF8 = "utf-8-sig"
"""The encoding of given files: UTF-8, with or without `MARK`."""
BLOCK = 1 << 20
"""The bytes that `require_utf8` reads at once."""
SHOWN = 4
"""The bytes that an error shows of what is not UTF-8."""
_ENDS = re.compile(r"\r\n|\n|\r")


def lines_of(text: str) -> list[str]:
    """The lines of a text without their ends; the end of the last one may be missing."""
    lines = _ENDS.split(text)
    return lines if lines[-1] else lines[:-1]


def whole_lines_of(text: str) -> list[str]:
    """The lines of a text with their ends: joined, they are the text."""
    cuts = [0, *(found.end() for found in _ENDS.finditer(text)), len(text)]
    return [text[start:stop] for start, stop in pairwise(cuts) if start < stop]


def lines_of_input() -> list[str]:
    """The lines of standard input."""
    return lines_of(sys.stdin.read().removeprefix(MARK))


def require_utf8(read: Callable[[int], bytes], path: Path, field: str) -> None:
    """Call `read` for the bytes of a file to its end; raises `InvalidValue`, with the line and byte, if not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, begins = 1, 0
    while True:
        block = read(BLOCK)
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            data, at = error.object, error.start  # behind the bytes of a character that the block before began
            line, byte = line + data.count(b"\n", 0, at), begins + len(block) - len(data) + at
            given = f"{path}, line {line}, byte {byte}: {data[at : at + SHOWN]!r}"
            allowed = "text in UTF-8; iconv converts other encodings, such as Latin-1"
            raise InvalidValue.of(field, given, allowed) from error
        if not block:
            return
        line, begins = line + block.count(b"\n"), begins + len(block)


def read_text(path: Path, field: str) -> str:
    """The text of a UTF-8 file, whose line ends become line feeds.

    Raises `InvalidValue` with the name of the `field` for a file that cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(UTF8)
    except UnicodeDecodeError as error:
        with path.open("rb") as file:
            require_utf8(file.read, path, field)
        raise InvalidValue.of(field, str(path), "UTF-8 text") from error
    except OSError as error:
        raise InvalidValue.of(field, str(path), f"a readable file: {error.strerror}") from error


def read_lines(path: Path, field: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their ends; files named *.gz are decompressed.

    Raises `InvalidValue` as `read_text` does.
    """
    try:
        with gzip.open(path, "rt", encoding=UTF8) if path.suffix == ".gz" else path.open(encoding=UTF8) as file:
            for line in file:
                yield line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError):
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as data:
                require_utf8(data.read, path, field)
        raise InvalidValue.of(field, str(path), f"UTF-8 text that can be read ({error})") from error


def files_of(path: Path) -> list[Path]:
    """The file at `path`, or the files of the folder there, sorted; hidden ones, such as .DS_Store, are no data."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
