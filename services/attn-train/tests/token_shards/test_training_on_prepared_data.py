"""Training on prepared data: every document as if it were alone, every row once an epoch, and the same after a stop."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue
from attn_models.decoder.decoder import Decoder
from attn_schema.decoder import DecoderConfig
from attn_schema.prepared import prepared_sources
from attn_schema.training import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.admission import check_config
from attn_train.checkpoint import CheckpointFolder
from attn_train.data.token_shards.order import MixedSource, Mixture, RecordReader, WindowReader, shuffled
from attn_train.data.token_shards.shards import TRAIN
from attn_train.records import Stop, StopFlag
from attn_train.tasks.base import PADDED, on_host, to_device
from attn_train.tasks.distillation import DistillationTask
from attn_train.tasks.packed import lengths_of, open_prepared
from attn_train.trainer import NullReporter, Trainer
from torch.nn import functional

CONTEXT = 48


@pytest.fixture
def folder(tmp_path, prepared, lines):
    prepared([lines], tmp_path / "tokens", validation_fraction=0.2)
    return tmp_path / "tokens"


def config(folder, *, steps=8, **data):
    return TrainingConfig(
        model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, max_seq_len=CONTEXT).with_defaults(),
        data=DataConfig(prepared=str(folder), **data),
        optimizer=OptimizerConfig(steps=steps, batch_size=4).with_defaults(),
        checkpoint=CheckpointConfig(save_steps=3),
        evaluation=EvaluationConfig(eval_steps=4, eval_batches=2, logging_steps=1),
    )


def decoder(vocab_size, mechanism="mha", **fields):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_seq_len": CONTEXT, "vocab_size": vocab_size}
    return Decoder(DecoderConfig(mechanism=mechanism, **shape, **fields)).double()


def dataset(folder):
    return open_prepared(prepared_sources(str(folder)))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 1000])
def test_a_shuffled_epoch_has_every_place_once_in_another_order_for_each_seed(count):
    orders = [[shuffled(place, count, seed) for place in range(count)] for seed in (0, 1)]
    assert [sorted(order) for order in orders] == [list(range(count))] * 2
    assert count < 10 or orders[0] != orders[1]


def test_windows_of_an_epoch_are_the_tokens_in_their_order(folder):
    held = dataset(folder).sources[0][1].set(TRAIN)
    stream = np.concatenate([np.fromfile(folder / f"{shard.name}.tokens", "<u2") for shard in held.shards])
    reader = WindowReader(held, CONTEXT)
    rows = [reader.row(place, seed=5)[0].inputs for place in range(reader.items)]
    wanted = stream[: reader.items * CONTEXT].reshape(-1, CONTEXT)
    assert len(rows) == (len(stream) - 1) // CONTEXT > 20
    assert sorted(map(bytes, rows)) == sorted(bytes(row.astype(np.int64)) for row in wanted)


def test_nothing_is_predicted_over_the_end_of_a_document(folder):
    data = dataset(folder)
    (end,) = data.tokenizer.end_ids
    inputs, documents, targets = data.task(config(folder)).next_batch()
    assert torch.equal(targets == PADDED, inputs == end)
    begins = torch.zeros_like(documents)
    begins[:, 1:] = inputs[:, :-1] == end
    assert torch.equal(documents, begins.cumsum(1))


PLACES = {
    "rotary": {"positions": "rotary"},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
}
LAYERS = [*(("mha", place) for place in PLACES), ("sliding_window", "rotary"), ("linear", "none"), ("mla", "rotary")]


@pytest.mark.parametrize(("mechanism", "place"), LAYERS)
def test_documents_of_a_row_are_computed_as_if_each_were_alone(folder, mechanism, place):
    data = dataset(folder)
    task = data.task(config(folder))
    batch = task.next_batch()
    inputs, documents, targets = batch
    model = decoder(data.tokenizer.vocab_size, mechanism, **PLACES.get(place, {"positions": "none"}))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(inputs)):
        for number in documents[row].unique():
            mine = documents[row] == number
            logits = model(inputs[row, mine][None])[0]
            total = total + functional.cross_entropy(logits, targets[row, mine], ignore_index=PADDED, reduction="sum")
            count += int((targets[row, mine] != PADDED).sum())
    loss = task.loss(model, batch)
    torch.testing.assert_close(loss, total / count, rtol=1e-12, atol=0)
    together = model.next_token_loss(inputs, targets)
    assert abs((together - loss).item()) > 1e-6


def test_numbers_of_documents_stay_on_the_cpu_as_a_gpu_would_be_waited_for(folder):
    task = dataset(folder).task(config(folder))
    batch = task.next_batch()
    there = to_device(batch, torch.device("meta"), on_host(task))
    assert [part.device.type for part in there] == ["meta", "cpu", "meta"]
    assert lengths_of(there[1]) == lengths_of(batch[1])


def test_lengths_are_those_of_runs_of_equal_numbers_within_rows():
    rows = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [0, 1, 2, 2, 3]])
    assert lengths_of(rows) == [2, 3, 5, 1, 1, 2, 1]
    assert lengths_of(torch.zeros(3, 5, dtype=torch.long)) is None
    assert lengths_of(None) is None


def test_a_task_that_wraps_another_keeps_what_it_keeps_on_the_host(folder):
    asked = config(folder)
    task = dataset(folder).task(asked)
    assert on_host(DistillationTask(task, None, asked)) == on_host(task) == (1,)


def test_without_the_mask_rows_are_attended_to_as_wholes(folder):
    data = dataset(folder)
    task = data.task(config(folder, document_mask=False))
    inputs, documents, targets = batch = task.next_batch()
    model = decoder(data.tokenizer.vocab_size)
    torch.testing.assert_close(task.loss(model, batch), model.next_token_loss(inputs, targets))
    assert len(lengths_of(documents)) > len(inputs)


class Recorder(NullReporter):
    def __init__(self):
        self.losses = {}

    def metrics(self, step, values):
        self.losses.setdefault(step, {}).update({k: v for k, v in values.items() if "second" not in k})


class StopAfter(StopFlag):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def get(self):
        self.left -= 1
        return Stop.SAVE if self.left < 0 else None


def test_every_batch_size_measures_the_same_rows(folder, monkeypatch):
    monkeypatch.setattr("attn_train.tasks.base.VALIDATION_TOKENS", 100)
    data = dataset(folder)
    model = decoder(data.tokenizer.vocab_size)
    losses = []
    for batch_size in (1, 4, 5, 64):
        asked = config(folder)
        task = data.task(asked.replace(optimizer=asked.optimizer.replace(batch_size=batch_size)))
        # One batch has fewer rows than there are, so that it matters which ones they are.
        losses.append(task.validation_loss(model, 1, lambda: None))
    (held,) = data.validation_sets().values()
    assert held.tokens > 200
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-9)


@pytest.mark.parametrize("stopped", [2, 5])
def test_a_run_that_stopped_goes_on_with_the_next_row_bit_for_bit(tmp_path, prepared, folder, stopped, sentences):
    (tmp_path / "b.txt").write_text("\n".join(sentences(80, seed=4)), encoding="utf-8")
    prepared([tmp_path / "b.txt"], tmp_path / "books", validation_fraction=0.2)
    mixture = f"{folder}:3,{tmp_path / 'books'}:1"

    def trainer(home):
        data = dataset(mixture)
        model = decoder(data.tokenizer.vocab_size).float()
        return Trainer(model, data, config(mixture), checkpoints=CheckpointFolder(home))

    whole, cut = Recorder(), Recorder()
    trainer(tmp_path / "whole").run(whole, StopFlag())
    trainer(tmp_path / "cut").run(cut, StopAfter(stopped))
    rest = trainer(tmp_path / "cut")
    assert rest.resume()
    assert rest.step == stopped
    rest.run(cut, StopFlag())
    assert cut.losses == whole.losses
    measured = whole.losses[8]
    named = [measured["validation_loss_tokens_validation"], measured["validation_loss_books_validation"]]
    assert measured["validation_loss"] == pytest.approx(sum(named) / 2)
    assert measured["epochs_tokens"] > 0


def test_a_worker_begins_without_servers_and_without_libraries_that_a_step_does_not_need(folder):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from attn_schema.training import *\n"
        "from attn_train.data.load import load_dataset\n"
        "from attn_train.model import resolved\n"
        "from attn_train.records import StopFlag\n"
        "from attn_train.trainer import NullReporter, Trainer\n"
        "from attn_train.worker import build_model\n"
        "folder = sys.argv[1]\n"
        "model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=16)\n"
        "config = resolved(TrainingConfig(model=model, data=DataConfig(prepared=folder),"
        " optimizer=OptimizerConfig(steps=1, batch_size=2)))\n"
        "data = load_dataset(config, Path(folder), print)\n"
        "trainer = Trainer(build_model(config, data), data, config)\n"
        "trainer.run(NullReporter(), StopFlag())\n"
        "print('steps', trainer.step)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    *_, steps, loaded = done.stdout.splitlines()
    assert steps == "steps 1"
    heavy = {"ray", "grpc", "fastapi", "transformers", "datasets", "pandas", "pyarrow", "scipy", "matplotlib", "PIL"}
    assert heavy.isdisjoint(loaded.split())


def test_a_mixture_draws_by_weight_and_stops_at_its_epochs(folder):
    reader = WindowReader(dataset(folder).sources[0][1].set(TRAIN), CONTEXT)
    mixture = Mixture([MixedSource("a", reader, 0.7), MixedSource("b", reader, 0.3)], seed=1)
    for _ in range(2000):
        mixture.next_row()
    rows, items = (mixture.position()[name].tolist() for name in ("rows", "items"))
    assert rows == [2000]
    assert 1300 < items[0] < 1500
    assert sum(items) == 2000
    once = Mixture([MixedSource("a", reader, 0.5, epochs=1), MixedSource("b", reader, 0.5, epochs=2)], seed=1)
    drawn = [bytes(once.next_row().inputs) for _ in range(3 * reader.items)]
    assert sorted(drawn) == sorted(3 * [bytes(reader.row(place, 0)[0].inputs) for place in range(reader.items)])
    with pytest.raises(InvalidValue, match="more epochs, or fewer steps"):
        once.next_row()


def test_what_does_not_fit_is_refused_before_a_job_is_accepted(tmp_path, prepared, folder, lines):

    def refused(given, said, kind=InvalidValue):
        with pytest.raises(kind, match=said) as error:
            check_config(given, home=tmp_path / "home")
        assert "\n" not in error.value.message

    check_config(config(folder), home=tmp_path / "home")
    refused(config(tmp_path / "nowhere"), "attn data prepare")
    refused(config("relative"), "absolute path")
    refused(config(f"{folder}:1:1", steps=10_000), "more epochs, or train for fewer steps")
    prepared([lines], tmp_path / "other", tokenizer="byte_pairs:300")
    refused(config(f"{folder},{tmp_path / 'other'}"), "another tokenizer", Incompatible)
    shared = config(folder)
    shared = shared.replace(model=shared.model.replace(kv_sharing="cla:2"))
    refused(shared, "document_mask must be false", Incompatible)
    check_config(shared.replace(data=shared.data.replace(document_mask=False)), home=tmp_path)
    encoder = TrainingConfig(model=ModelConfig(max_encoder_len=8), data=DataConfig(prepared=str(folder)))
    refused(encoder, "the kind pairs")


@pytest.mark.parametrize("text", ["a:0", "a:-1", "a,,b", "a:1,a:2", ":1", "a:1:-2", "a:nan"])
def test_a_mixture_that_says_nothing_sensible_is_refused(text):
    with pytest.raises(InvalidValue, match="prepared"):
        DataConfig(prepared=text)


def test_a_dataset_or_tokenizer_beside_prepared_data_is_refused():
    others = {"dataset": "shakespeare", "tokenizer": "byte_pairs:300", "format": "chat", "skip_broken": True}
    for other in ({name: value} for name, value in others.items()):
        with pytest.raises(InvalidValue, match="with prepared data"):
            DataConfig(prepared="/data/tokens", **other)


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_rows_are_packed_with_whole_conversations_of_which_answers_are_learned(
    tmp_path, prepared, tokenizer_folder, sentences
):
    named = tmp_path / "chatty"
    named.mkdir()
    for file in tokenizer_folder.iterdir():
        (named / file.name).write_bytes(file.read_bytes())
    settings = json.loads((named / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (named / "tokenizer_config.json").write_text(json.dumps(settings))
    texts = [text[:30] for text in sentences(60)]
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"yes {place}"}]}
        for place, text in enumerate(texts)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    prepared([tmp_path / "chats.jsonl"], tmp_path / "out", kind="chat", tokenizer=str(named))
    data = dataset(tmp_path / "out")
    reader = RecordReader(data.sources[0][1].set(TRAIN), 96)
    answers, position, packed = [], 0, 0
    while position < reader.items:
        row, position = reader.row(position, seed=2)
        packed = max(packed, int(row.documents.max()))
        for number in range(int(row.documents.max()) + 1):
            learned = row.targets[(row.documents == number) & (row.targets != PADDED)]
            if len(learned):
                answers.append(data.tokenizer.decode(learned.tolist()))
    assert sorted(answers) == sorted(f"yes {place}" for place in range(60))
    assert packed > 1
