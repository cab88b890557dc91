"""`attn evaluate`: trained folders on data of one's own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import typer
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.evaluation import text_loss
from attn_models.loading.encoders import save_encoder
from attn_schema import DeviceConfig
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.load import load_dataset
from attn_train.evaluation import evaluate
from attn_train.plugin import evaluate_command
from attn_train.worker import build_model

BLOCKS = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 16}
SENTENCES = "1\ta\t_\tX\t_\t_\t2\t_\t_\t_\n2\tb\t_\tY\t_\t_\t0\t_\t_\t_\n\n" * 20


@pytest.fixture
def files(tmp_path, words):
    (tmp_path / "words.txt").write_text(words)
    (tmp_path / "x.conllu").write_text(SENTENCES)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", x=pixels, y=np.arange(20) % 10)
    return tmp_path


def shell(*words: str) -> None:
    """Run `attn evaluate`."""
    app = typer.Typer()
    app.command()(evaluate_command)
    app(list(words), standalone_mode=False)


def left(files, model, **data):
    """The folder of an untrained model of this data."""
    data = DataConfig(**{"validation_fraction": 0.5} | data)
    optimizer = OptimizerConfig(steps=1, batch_size=2, learning_rate=1e-3, min_learning_rate=0)
    config = TrainingConfig(model=model, data=data, optimizer=optimizer)
    dataset = load_dataset(config, files, lambda _: None)
    trained = build_model(config, dataset)
    return dataset.save(files / "model", trained), dataset, trained, config


def test_images_are_named_as_when_training_was_over(files):
    model = ModelConfig.of("vit", BLOCKS | {"patch": 4})
    folder, dataset, trained, _ = left(files, model, dataset=str(files / "x.npz"), validation_fraction=0.0)
    found = evaluate(folder, str(files / "x.npz"), files)
    with torch.inference_mode():
        images = dataset.training.images.float() / 127.5 - 1
        right = (trained.eval()(images).argmax(-1) == dataset.training.labels).float().mean().item()
    assert found["images"] == 20
    assert found["accuracy"] == pytest.approx(right)
    with pytest.raises(InvalidValue, match="zero"):
        evaluate(folder, "digits", files)


@pytest.mark.parametrize("positions", ["every", "depth"])
def test_words_are_tagged_as_when_training_was_over(files, positions):
    model = ModelConfig.of("tagger", BLOCKS | {"max_seq_len": 8, "positions": positions})
    folder, dataset, trained, config = left(files, model, dataset=str(files / "x.conllu"), tokenizer="word")
    found = evaluate(folder, str(files / "x.conllu"), files)
    expected = dataset.task(config).final_metrics(trained, lambda: None)
    assert found == {"sentences": 20, "accuracy": pytest.approx(expected["accuracy"])}
    (files / "none.conllu").write_text("1\ta\t_\t_\t_\t_\t0\t_\t_\t_\n")
    with pytest.raises(InvalidValue, match="at least one tagged sentence"):
        evaluate(folder, str(files / "none.conllu"), files)


def test_masked_tokens_are_guessed_and_the_command_says_how_well(files, capsys):
    model = ModelConfig.of("masked_lm", BLOCKS | {"max_seq_len": 8})
    folder, *_ = left(files, model, dataset=str(files / "words.txt"))
    shell(str(folder), "--dataset", str(files / "words.txt"), "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == len((files / "words.txt").read_text())
    assert 0 <= found["masked_accuracy"] <= 1
    assert found == evaluate(folder, str(files / "words.txt"), files)
    (files / "short.txt").write_text("key")
    with pytest.raises(InvalidValue, match="more tokens"):
        evaluate(folder, str(files / "short.txt"), files)


def test_every_token_of_a_text_is_foreseen_from_those_before_it_in_its_window(files, capsys):
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, max_seq_len=8, mechanism="mha")
    folder, dataset, trained, _ = left(files, model, dataset=str(files / "words.txt"))
    text = (files / "words.txt").read_text()[: 8 * 600 + 4]
    (files / "some.txt").write_text(text)
    shell(str(folder), "--dataset", str(files / "some.txt"), "--json")
    found = json.loads(capsys.readouterr().out)
    ids = torch.from_numpy(dataset.tokenizer.encode_corpus(text)).long()
    nats = 0.0
    with torch.inference_mode():
        for place in range(1, len(ids)):
            start = (place - 1) // 8 * 8
            scores = trained.eval()(ids[None, start:place])[0, -1].double().log_softmax(-1)
            nats -= scores[ids[place]].item()
    loss = nats / (len(ids) - 1)
    assert found == {
        "tokens": len(ids),
        "window": 8,
        "loss": pytest.approx(loss, rel=1e-4),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-4),
        "bits_per_byte": pytest.approx(nats / math.log(2) / len(text.encode()), rel=1e-4),
        "word_perplexity": pytest.approx(math.exp(nats / len(text.split())), rel=1e-3),
    }
    (files / "short.txt").write_text("k")
    with pytest.raises(InvalidValue, match="two tokens or more"):
        evaluate(folder, str(files / "short.txt"), files)


@pytest.mark.parametrize("tokens", [2, 8, 9, 16, 17, 33, 40])
def test_windows_side_by_side_lose_no_token(tokens, monkeypatch):
    seen = []

    class Counting(torch.nn.Module):
        def next_token_loss(self, inputs, targets, ignored, smoothing):
            seen.extend(targets.flatten().tolist())
            assert inputs.shape[1] <= 8
            assert torch.equal(inputs + 1, targets)
            return targets.float().mean()

    monkeypatch.setattr("attn_models.evaluation.TOKENS_PER_BATCH", 16)
    assert text_loss(Counting(), torch.arange(tokens, dtype=torch.int32), 8) == pytest.approx(tokens / 2)
    assert seen == list(range(1, tokens))


def test_other_models_and_folders_that_are_none_are_refused(files):
    pairs = "\n".join(f"{word}\t{word} {word}" for word in ("one", "two", "three")) + "\n"
    (files / "pairs.tsv").write_text(pairs)
    model = ModelConfig.of("luong", {"hidden_size": 8, "embedding": 8, "max_encoder_len": 8, "max_seq_len": 8})
    folder, *_ = left(files, model, dataset=str(files / "pairs.tsv"), tokenizer="word")
    with pytest.raises(Incompatible, match="attn translate"):
        evaluate(folder, str(files / "words.txt"), files)
    encoder = ModelConfig.of("masked_lm", BLOCKS | {"max_seq_len": 8})
    folder, _, trained, _ = left(files, encoder, dataset=str(files / "words.txt"))
    save_encoder(files / "bare", trained.encoder)
    with pytest.raises(Incompatible, match="only encoders for"):
        evaluate(files / "bare", str(files / "words.txt"), files)
    with pytest.raises(CheckpointInvalid):
        evaluate(files, "digits", files)
    with pytest.raises(UnknownName, match="unknown model or folder 'nowhere'"):
        shell("nowhere", "--dataset", "digits")


def test_a_device_or_type_that_is_not_there_is_refused_by_name(files):
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    model = ModelConfig.of("masked_lm", BLOCKS | {"max_seq_len": 8})
    folder, *_ = left(files, model, dataset=str(files / "words.txt"))
    for given, field in ((DeviceConfig(device="cuda"), "device"), (DeviceConfig(dtype="bfloat16"), "dtype")):
        with pytest.raises(InvalidValue) as error:
            evaluate(folder, str(files / "words.txt"), files, given)
        assert error.value.metadata["field"] == field
    assert evaluate(folder, str(files / "words.txt"), files, DeviceConfig(device="cpu"))["tokens"] > 0
