"""Lines of text files."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

from attn_core.errors import InvalidValue


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, compressed by gzip where it is called so, as they come, without their ends."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidValue.of("data.path", str(path), f"UTF-8 text that can be read ({error})") from error
