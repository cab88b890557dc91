"""Text keeps its characters: only line feeds and carriage returns end a line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from attn_core.errors import InvalidValue
from attn_schema import text_files
from attn_schema.config_file import read_config
from attn_schema.text_files import files_of, lines_of, read_lines, read_text, whole_lines_of

TEXTS = [
    "",
    "a",
    "a\n",
    "\n",
    "a\r\nb\n\rc",
    "x\u2028y\u2029z\x85w\x0b\x0c\x1c\x1d\x1e\n",
    "a\n\nb",
    "\u2028\r",
    "\r\n\r\n",
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_lines_are_those_of_pythons_own_files(text: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"lines.txt{ending}"
    path.write_bytes(gzip.compress(text.encode()) if ending else text.encode())
    with gzip.open(path, "rt", encoding="utf-8") if ending else path.open(encoding="utf-8") as file:
        theirs = [line.removesuffix("\n") for line in file]
    assert lines_of(text) == list(read_lines(path, "data")) == theirs
    assert "".join(whole_lines_of(text)) == text
    assert [line.rstrip("\r\n") for line in whole_lines_of(text)] == lines_of(text)


@pytest.mark.parametrize("bad", [b"\xe9t\xe9", b"\xc3", b"\xe2\x82", b"\xff\xfeo\0"])
@pytest.mark.parametrize("before", ["", "a\n€\r\nb", "\ufeffä\n", "€" * 5])
def test_what_is_not_utf_8_is_placed_as_by_pythons_decoder_wherever_blocks_end(monkeypatch, tmp_path, bad, before):
    data, path = before.encode() + bad, tmp_path / "latin.txt"
    path.write_bytes(data)
    with pytest.raises(UnicodeDecodeError) as theirs:
        data.decode()
    at, line = theirs.value.start, data.count(b"\n", 0, theirs.value.start) + 1
    for size in range(1, len(data) + 2):
        monkeypatch.setattr(text_files, "BLOCK", size)
        with pytest.raises(InvalidValue) as ours:
            read_text(path, "data")
        assert f"latin.txt, line {line}, byte {at}: " in ours.value.metadata["given"]
    path.write_bytes(before.encode())
    with path.open("rb") as file:
        text_files.require_utf8(file.read, path, "data")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbfname = 1\n")
    assert read_text(path, "data") == "name = 1\n"
    assert list(read_lines(path, "data")) == ["name = 1"]
    assert read_config(path) == {"name": 1}


def test_what_cannot_be_read_is_refused_with_the_field(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"ab\xff")
    for path in (tmp_path / "a", tmp_path / "nowhere", tmp_path):
        for read in (read_text, lambda path, field: list(read_lines(path, field))):
            with pytest.raises(InvalidValue) as caught:
                read(path, "data")
            assert caught.value.metadata["field"] == "data"


def test_hidden_files_of_a_folder_are_no_data(tmp_path: Path) -> None:
    for name in ("b.txt", ".DS_Store", "._b.txt", "a.txt"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    assert [file.name for file in files_of(tmp_path)] == ["a.txt", "b.txt"]
    assert files_of(tmp_path / "b.txt") == [tmp_path / "b.txt"]
