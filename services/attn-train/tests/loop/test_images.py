"""Images: read from files as they are, refused where they do not fit, and named after training."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch
from attn_core.errors import InvalidValue
from attn_models.loading.encoders import load_image_classifier
from attn_schema.training import DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from attn_train.data.images import load_images
from attn_train.data.synthetic import digits
from attn_train.records import StopFlag
from attn_train.tasks.image_classification import classification_metrics, normalize_pixels
from attn_train.trainer import Trainer
from attn_train.worker import build_model

PIXELS = np.random.default_rng(0).integers(0, 256, (30, 6, 6), dtype=np.uint8)
LABELS = np.arange(30) % 3
FIELDS = {"patch": 2, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 32}


def kept(path, **arrays):
    np.savez(path, **arrays)
    return DataConfig(dataset=str(path), validation_fraction=0.2)


@pytest.mark.parametrize("shape", [(30, 36), (30, 6, 6), (30, 6, 6, 1)])
@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_images_of_any_layout_are_the_same(tmp_path, shape, kind):
    pixels = PIXELS if kind == "uint8" else (PIXELS / 255).astype(kind)
    found = load_images(kept(tmp_path / "i.npz", x=pixels.reshape(shape), y=LABELS))
    assert found.model_fields == {"image": 6, "channels": 1, "classes": 3}
    assert (len(found.training.labels), len(found.validation.labels)) == (24, 6)
    images = torch.cat([found.training.images, found.validation.images])[:, 0]
    labels = torch.cat([found.training.labels, found.validation.labels])
    known = {row.tobytes(): label for row, label in zip(PIXELS, LABELS.tolist(), strict=True)}
    assert [known[image.numpy().tobytes()] for image in images] == labels.tolist()


def test_a_test_set_of_its_own_is_kept_for_validation(tmp_path):
    arrays = {"x_train": PIXELS[:20], "y_train": LABELS[:20], "x_test": PIXELS[20:], "y_test": LABELS[20:]}
    found = load_images(kept(tmp_path / "i.npz", **arrays))
    assert torch.equal(found.validation.images[:, 0], torch.from_numpy(PIXELS[20:]))
    assert torch.equal(found.training.labels, torch.from_numpy(LABELS[:20]))


def test_a_folder_of_pictures_has_a_folder_for_each_kind(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number, pixels in enumerate(PIXELS):
        kind = tmp_path / ("cat", "dog", "bird")[number % 3]
        kind.mkdir(exist_ok=True)
        image.fromarray(pixels).save(kind / f"{number}.png")
    found = load_images(DataConfig(dataset=str(tmp_path), validation_fraction=0.5))
    assert tuple(found.names) == ("bird", "cat", "dog")
    assert found.model_fields == {"image": 6, "channels": 1, "classes": 3}
    known = {row.tobytes(): ("cat", "dog", "bird")[number % 3] for number, row in enumerate(PIXELS)}
    for picture, label in zip(found.training.images, found.training.labels.tolist(), strict=True):
        assert known[picture[0].numpy().tobytes()] == found.names[label]
    image.new("L", (6, 7)).save(tmp_path / "cat" / "other.png")
    with pytest.raises(InvalidValue, match=r"other\.png"):
        load_images(DataConfig(dataset=str(tmp_path)))
    (tmp_path / "cat" / "other.png").write_bytes(b"no picture")
    with pytest.raises(InvalidValue, match="can be read"):
        load_images(DataConfig(dataset=str(tmp_path)))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": PIXELS}, "x_train"),
        ({"x": PIXELS[:, :5], "y": LABELS}, "square images"),
        ({"x": PIXELS.reshape(30, 36)[:, :35], "y": LABELS}, "square images"),
        ({"x": PIXELS[:0], "y": LABELS[:0]}, "square images"),
        ({"x": PIXELS, "y": LABELS[:29]}, "one integer label per image"),
        ({"x": PIXELS, "y": LABELS / 2}, "one integer label per image"),
        ({"x": PIXELS, "y": LABELS - 1}, "labels from -1"),
        ({"x": PIXELS.astype("int32"), "y": LABELS}, "uint8"),
        ({"x": PIXELS / 100.0, "y": LABELS}, "from 0 to 1"),
        ({"x": np.full((30, 6, 6), np.nan), "y": LABELS}, "from 0 to 1"),
        ({"x": np.array([{}] * 30, dtype=object), "y": LABELS}, "pickle"),
        (
            {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:, :4, :4], "y_test": LABELS},
            "test images of the shape",
        ),
    ],
)
def test_what_are_no_images_is_refused(tmp_path, arrays, said):
    with pytest.raises(InvalidValue, match=said):
        load_images(kept(tmp_path / "i.npz", **arrays))


def test_files_that_are_no_arrays_or_claim_more_than_they_hold_are_refused(tmp_path):
    path = tmp_path / "i.npz"
    path.write_bytes(b"PK no")
    with pytest.raises(InvalidValue, match=r"\.npz"):
        load_images(DataConfig(dataset=str(path)))
    np.save(tmp_path / "one.npy", PIXELS)
    with pytest.raises(InvalidValue, match=r"\.npz"):
        load_images(DataConfig(dataset=str(tmp_path / "one.npy")))
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (10**9, 28, 28)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(InvalidValue, match="complete arrays"):
        load_images(DataConfig(dataset=str(path)))


def vit_spec(steps, **fields):
    return TrainingConfig(
        model=ModelConfig.of("vit", FIELDS | fields),
        data=DataConfig(dataset="digits", validation_fraction=0.2),
        optimizer=OptimizerConfig(
            steps=steps, batch_size=32, learning_rate=5e-3, min_learning_rate=1e-4, warmup_steps=10
        ),
    )


def test_digits_come_along_and_are_named_after_some_steps(record, tmp_path):
    config = vit_spec(120)
    dataset = load_images(config.data)
    first = torch.tensor([[int(shade) for shade in row] for row in digits()[0][0]]) * 255 / 16
    torch.testing.assert_close(dataset.training.images[0, 0].float(), first, atol=0.5, rtol=0)
    model, report = build_model(config, dataset), record()
    Trainer(model, dataset, config).run(report, StopFlag())
    found = dataset.task(config).final_metrics(model, lambda: None)
    assert found["accuracy"] > 0.4
    loaded = load_image_classifier(dataset.save(tmp_path / "m", model))
    accuracy = classification_metrics(loaded.model, dataset.validation)["accuracy"]
    assert accuracy == pytest.approx(found["accuracy"])
    told = loaded.classify(normalize_pixels(dataset.validation.images))
    names = [max(row, key=row.__getitem__) for row in told]
    truth = [dataset.names[label] for label in dataset.validation.labels.tolist()]
    assert sum(a == b for a, b in zip(names, truth, strict=True)) / len(truth) == pytest.approx(accuracy)
