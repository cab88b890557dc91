"""Prepared data is what the tokenizer makes of the files, whatever their format and however many processes made it."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pyarrow as pa
import pytest
from attn_core.errors import InvalidValue, UserError
from attn_models.tokenizers import Tokenizer
from attn_train.data.token_shards import prepare as preparation
from attn_train.data.token_shards.pools import processes
from attn_train.data.token_shards.shards import PreparedData
from pyarrow import ipc, parquet


def contents(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def documents(data, name="train"):
    held = data.set(name)
    return [held.record(number)[0].ids.tolist() for number in range(held.records)]


def expected(texts, folder):
    tokenizer = Tokenizer.from_folder(folder)
    return [[*tokenizer.backend.encode(text, add_special_tokens=False).ids, *tokenizer.end_ids] for text in texts]


def jsonl(texts):
    return "".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def as_jsonl(path, texts):
    path.write_bytes(jsonl(texts))


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def as_zst(path, texts):
    half = len(texts) // 2
    # Two frames, as parallel compressors write them.
    path.write_bytes(b"".join(zstd(jsonl(part)) for part in (texts[:half], texts[half:])))


def as_gz(path, texts):
    path.write_bytes(gzip.compress(jsonl(texts)))


def as_parquet(path, texts):
    parquet.write_table(pa.table({"text": texts, "n": [1] * len(texts)}), path, row_group_size=40)


def with_a_mark(path, texts):
    as_jsonl(path, texts)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def as_arrow(path, texts):
    table = pa.table({"text": texts})
    with ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=64)


FORMATS = {
    "rows.jsonl": as_jsonl,
    "marked.jsonl": with_a_mark,
    "rows.jsonl.zst": as_zst,
    "rows.jsonl.gz": as_gz,
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_tokens_of_each_row_and_an_end(tmp_path, prepared, tokenizer_folder, name, sentences):
    texts = sentences(150)
    FORMATS[name](tmp_path / name, texts)
    data = prepared([tmp_path / name], tmp_path / "out")
    assert documents(data) == expected(texts, tokenizer_folder)


def test_the_lines_of_a_text_are_documents_where_that_is_asked_for(tmp_path, prepared, tokenizer_folder, sentences):
    texts = sentences(100)
    (tmp_path / "a.txt").write_text("\r\n\r\n".join(texts), encoding="utf-8", newline="")
    data = prepared([tmp_path / "a.txt"], tmp_path / "out", documents="line")
    assert documents(data) == expected(texts, tokenizer_folder)
    assert len(data.manifest.sets["train"]) > 3


def test_a_file_of_text_is_one_document_over_several_shards(tmp_path, prepared, sentences):
    text = "\n".join(sentences(200)) + "\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepared([tmp_path / "a.txt"], tmp_path / "out")
    (only,) = [data.set("train").window(0, data.set("train").tokens)]
    assert len(data.manifest.sets["train"]) > 3
    assert data.tokenizer.decode(only.ids.tolist()) == text
    assert only.ends.tolist() == [data.set("train").tokens]


def test_any_number_of_processes_writes_the_same_bytes(tmp_path, prepared, lines):
    options = {"validation_fraction": 0.2, "seed": 3}
    prepared([lines], tmp_path / "one", **options)
    prepared([lines], tmp_path / "two", pool=processes, workers=2, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


KILLED = """
import sys
from pathlib import Path
from attn_schema.prepared import PrepareConfig
from attn_train.data.token_shards.pools import inline
from attn_train.data.token_shards.prepare import Request, prepare
data, tokenizer, out = sys.argv[1:]
request = Request([data], PrepareConfig(tokenizer=tokenizer, validation_fraction=0.2), {}, 1500)
def tell(done, units, tokens):
    print(done, flush=True)
    if done == 3:
        sys.stdin.read()
prepare(request, Path(out), workers=1, pool=inline, progress=tell)
"""


def test_a_killed_preparation_goes_on_with_the_same_bytes_and_repeats_nothing(
    tmp_path, prepared, lines, tokenizer_folder
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    prepared([lines], whole, validation_fraction=0.2)
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(lines), str(tokenizer_folder), str(cut)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "3":
                break
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(InvalidValue, match="not finished"):
        PreparedData.open(cut)
    kept = {path.name: path.stat().st_mtime_ns for path in cut.glob("train-0000[0-2].tokens")}
    assert len(kept) == 3
    told = []
    time.sleep(0.02)
    prepared([lines], cut, validation_fraction=0.2, progress=lambda done, units, _: told.append((done, units)))
    assert told[0][0] == 4
    assert {name: (cut / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(cut) == contents(whole)


def test_a_folder_with_another_preparation_is_left_alone(tmp_path, prepared, lines):
    prepared([lines], tmp_path / "out")
    with pytest.raises(InvalidValue, match="a new folder"):
        prepared([lines], tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(InvalidValue, match="new or empty"):
        prepared([lines], tmp_path / "mine")


def test_rows_are_held_out_by_the_seed_and_named_sets_are_kept_apart(
    tmp_path, prepared, lines, tokenizer_folder, sentences
):
    other = tmp_path / "other.jsonl"
    as_jsonl(other, sentences(20, seed=9))
    sets = {"code": [str(other)]}
    data = prepared([lines], tmp_path / "a", validation_fraction=0.3, validation=sets)
    again = prepared([lines], tmp_path / "b", validation_fraction=0.3, validation=sets, seed=1)
    assert data.validation_sets == ["code", "validation"]
    assert documents(data, "code") == expected(sentences(20, seed=9), tokenizer_folder)
    kept = documents(data, "validation")
    assert 20 < len(kept) < 70
    assert sorted(documents(data) + kept) == sorted(expected(sentences(150), tokenizer_folder))
    assert documents(again, "validation") != kept


def test_the_end_of_a_text_is_held_out(tmp_path, prepared, sentences):
    text = "\n".join(sentences(200)) + "\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepared([tmp_path / "a.txt"], tmp_path / "out", validation_fraction=0.1)
    first, last = (
        data.tokenizer.decode(data.set(n).window(0, data.set(n).tokens).ids.tolist()) for n in ("train", "validation")
    )
    assert first + last == text
    assert 0.08 < len(last) / len(text) < 0.12


def test_byte_pairs_are_learned_from_the_data(tmp_path, prepared, lines, sentences):
    data = prepared([lines], tmp_path / "out", tokenizer="byte_pairs:300")
    assert data.tokenizer.vocab_size == 300
    assert data.tokenizer.decode(documents(data)[7]) == sentences(8)[7]


BAD = {
    "empty.txt": (lambda path, _: path.write_bytes(b""), "empty"),
    "binary.txt": (lambda path, _: path.write_bytes(b"abc\n\xff\xfe\x00def\n" * 9), "binary"),
    "zeros.txt": (lambda path, _: path.write_bytes(bytes(100)), "binary"),
    "program.exe": (lambda path, _: path.write_bytes(b"MZ"), "jsonl"),
    "no.zst.jsonl.zst": (lambda path, _: path.write_bytes(b"not compressed" * 9), "complete, readable"),
    "broken.jsonl": (
        lambda path, texts: path.write_bytes(jsonl(texts) + b'{"text": "x"\n'),
        r"line .*\d+.*JSON",
    ),
    "list.jsonl": (lambda path, _: path.write_bytes(b"[1]\n"), "an object"),
    "null.jsonl": (lambda path, texts: path.write_bytes(jsonl(texts) + b'{"text": null}\n'), "text .empty"),
    "other.jsonl": (lambda path, _: path.write_bytes(b'{"content": "x"}\n'), "content.*allowed: text"),
    "other.parquet": (lambda path, _: parquet.write_table(pa.table({"body": ["x"]}), path), "body.*allowed: text"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_refused_in_one_line_that_names_it(tmp_path, prepared, name, sentences):
    write, said = BAD[name]
    write(tmp_path / name, sentences(50))
    with pytest.raises(UserError, match=said) as refused:
        prepared([tmp_path / name], tmp_path / "out")
    assert "\n" not in refused.value.message
    assert not (tmp_path / "out" / "data.json").exists()


@pytest.mark.parametrize("name", ["rows.jsonl.zst", "rows.jsonl.gz", "rows.parquet", "rows.arrow"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.99])
def test_a_file_that_was_cut_off_is_refused_wherever_the_cut_is(tmp_path, prepared, name, kept, sentences):
    path = tmp_path / name
    FORMATS[name](path, sentences(200))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(InvalidValue, match=name):
        prepared([path], tmp_path / "out")
    assert not (tmp_path / "out" / "data.json").exists()


def test_byte_pairs_are_learned_from_a_number_of_bytes_not_characters(tmp_path, prepared, monkeypatch):
    learned_tokenizer, texts = preparation.learned_tokenizer, []
    monkeypatch.setattr(preparation, "LEARNED_FROM", 600)
    monkeypatch.setattr(
        preparation, "learned_tokenizer", lambda name, given: texts.extend(given) or learned_tokenizer(name, given)
    )
    as_jsonl(tmp_path / "rows.jsonl", ["ж" * 100] * 8)
    prepared([tmp_path / "rows.jsonl"], tmp_path / "out", tokenizer="byte_pairs:300")
    assert len(texts) == 4, "documents of 200 bytes, until they have more than 600"


def test_no_data_and_a_missing_tokenizer_are_refused(tmp_path, prepared, lines):
    with pytest.raises(InvalidValue, match="nothing-here"):
        prepared([tmp_path / "nothing-here*.txt"], tmp_path / "out")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        prepared([lines], tmp_path / "out", tokenizer=str(tmp_path))
    with pytest.raises(InvalidValue, match="columns"):
        prepared([lines], tmp_path / "out", columns=("a", "b"))
    with pytest.raises(InvalidValue, match="letters, digits"):
        prepared([lines], tmp_path / "out", validation={"no name": [str(lines)]})


def test_damaged_shards_are_told_by_size_at_once_and_by_content_when_verified(tmp_path, prepared, lines):
    prepared([lines], tmp_path / "out")
    shard = tmp_path / "out" / "train-00001.tokens"
    ids = np.fromfile(shard, "<u2")
    ids[5] ^= 1
    ids.tofile(shard)
    PreparedData.open(tmp_path / "out")
    with pytest.raises(InvalidValue, match=r"train-00001\.tokens, which was modified"):
        PreparedData.open(tmp_path / "out", verify=True)
    ids[:-1].tofile(shard)
    with pytest.raises(InvalidValue, match=r"train-00001\.tokens, which has"):
        PreparedData.open(tmp_path / "out")
    shard.unlink()
    with pytest.raises(InvalidValue, match="is missing"):
        PreparedData.open(tmp_path / "out")
