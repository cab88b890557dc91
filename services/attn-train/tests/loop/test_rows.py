"""Rows of tables as every kind of data, and prepared preferences and pairs, which are read from disk."""

from __future__ import annotations

import csv
import json
import re

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_schema.finetuning import LoraConfig, ObjectiveConfig
from attn_schema.prepared import PrepareConfig
from attn_schema.training import DataConfig, ModelConfig, TrainingConfig
from attn_train.data.labels import load_labels
from attn_train.data.load import load_dataset
from attn_train.data.pairs import load_pairs
from attn_train.data.token_shards.pools import inline
from attn_train.data.token_shards.prepare import Request, prepare
from attn_train.tasks.preferences import preference_dataset
from small_tasks import DECODER, SIZES, chats

SEQ2SEQ = ModelConfig.of("transformer", SIZES | {"max_seq_len": 24, "max_encoder_len": 24})
PAIRS = [(f"a{'b' * (number % 5)} c", f"c{'d' * (number % 3)} a") for number in range(40)]


def table(path, names, rows):
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([names, *rows])
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.table(dict(zip(names, zip(*rows, strict=True), strict=True))), path)
    else:
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_pairs_labels_and_documents_of_tables_are_those_of_plain_files(tmp_path, name):
    (tmp_path / "plain.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    both = [
        load_pairs(DataConfig(dataset=str(file)), SEQ2SEQ, "word")
        for file in (tmp_path / "plain.tsv", table(tmp_path / name, ("source", "target"), PAIRS))
    ]
    assert both[0].training == both[1].training
    assert both[0].texts == both[1].texts
    renamed = table(tmp_path / name, ("en", "de"), PAIRS)
    columns = DataConfig(dataset=str(renamed), columns=("source=en", "target=de"))
    assert load_pairs(columns, SEQ2SEQ, "word").training == both[0].training

    labels = [(number % 2, text) for number, (text, _) in enumerate(PAIRS)]
    (tmp_path / "plain.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in labels))
    both = [
        load_labels(DataConfig(dataset=str(file)), 24, "word")
        for file in (tmp_path / "plain.tsv", table(tmp_path / name, ("label", "text"), labels))
    ]
    assert both[0].training == both[1].training
    assert both[0].names == both[1].names == ["0", "1"]

    (tmp_path / "plain.txt").write_text("\n".join(text for text, _ in PAIRS[:36]))
    documents = table(tmp_path / name, ("text", "n"), [(text, 1) for text, _ in PAIRS])
    configs = [
        DataConfig(dataset=str(tmp_path / "plain.txt"), validation_fraction=0.0),
        DataConfig(dataset=str(documents)),
    ]
    plain, rows = (load_dataset(TrainingConfig(model=DECODER, data=data), tmp_path, lambda _: None) for data in configs)
    assert plain.tokenizer.decode(plain.training.tolist()) == rows.tokenizer.decode(rows.training.tolist())
    assert "columns left aside: n" in rows.summary


def prepared(path, out, tokenizer, **options):
    return prepare(Request([str(path)], PrepareConfig(tokenizer=str(tokenizer), **options)), out, workers=1,
                   pool=inline, progress=lambda *_: None)  # fmt: skip


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_prepared_preferences_are_trained_on_as_those_of_files(tmp_path, loss):
    _, known = chats("", tmp_path)
    for name, content in known.tokenizer.files().items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / name).write_bytes(data)
    rows = [("hi", "y" * (number % 30), "no") for number in range(40)]
    file = table(tmp_path / "p.jsonl", ("prompt", "chosen", "rejected"), rows)
    folder = prepared(file, tmp_path / "out", tmp_path, kind="preference").folder
    data = DataConfig(prepared=str(folder), format="preference")
    made = {"model": DECODER.replace(base_model="/base"), "lora": LoraConfig(lora_rank=2)}
    config = TrainingConfig(data=data, objective=ObjectiveConfig(preference_loss=loss), **made)
    plain = DataConfig(dataset=str(file), format="preference", validation_fraction=0.0)
    both = [
        load_dataset(config, tmp_path, lambda _: None),
        preference_dataset(plain, known.tokenizer, loss=loss, max_length=24),
    ]
    counts = [re.findall(r"(\d+) left out as too long", data.summary) for data in both]
    assert counts[0]
    # A record is left out as a whole.
    assert loss == "kto" or counts[0] == counts[1]
    if loss == "kto":
        fitting = {(one.chat.inputs, one.desirable) for one in both[1].training}
        assert {(one.chat.inputs, one.desirable) for one in both[0].training} <= fitting
    else:
        for one, other in zip(both[0].training, both[1].training, strict=True):
            assert [(chat.inputs, chat.targets) for chat in one.chats] == [(c.inputs, c.targets) for c in other.chats]
        batches = [dataset.task(config) for dataset in both]
        for _ in range(5):
            one, other = (task.next_batch() for task in batches)
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(InvalidValue, match="preference"):
        load_dataset(config.replace(data=data.replace(format="text")), tmp_path, lambda _: None)


def test_prepared_pairs_are_trained_on_as_those_of_files(tmp_path):
    file = table(tmp_path / "p.jsonl", ("source", "target"), PAIRS)
    plain = load_pairs(DataConfig(dataset=str(file), validation_fraction=0.0), SEQ2SEQ, "byte_pairs:300")
    folder = prepared(file, tmp_path / "out", "byte_pairs:300", kind="pairs").folder
    config = TrainingConfig(model=SEQ2SEQ, data=DataConfig(prepared=str(folder)))
    assert list(load_dataset(config, tmp_path, lambda _: None).training) == list(plain.training)
    with pytest.raises(InvalidValue, match="one folder"):
        load_dataset(config.replace(data=DataConfig(prepared=f"{folder}:2")), tmp_path, lambda _: None)
    with pytest.raises(InvalidValue, match="max_seq_len"):
        load_dataset(config.replace(model=SEQ2SEQ.replace(max_seq_len=2)), tmp_path, lambda _: None)
