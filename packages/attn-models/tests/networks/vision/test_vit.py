"""Vision Transformers: transformers' logits in transformers' folders, and images that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue, UnknownName
from attn_models.adapters.state_dict import init_empty_weights
from attn_models.adapters.vit import VitAdapter
from attn_models.encoder.config import VisionConfig
from attn_models.encoder.encoder import VisionTransformer
from attn_models.loading.encoders import ImageClassifier, load_image_classifier
from attn_schema.decoder import AttentionChoice
from attn_testing.checkpoints import require_same_model
from safetensors.torch import load_file, save_file

SIZES = {
    "image": 8,
    "patch": 4,
    "classes": 3,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "channels": 2,
}
LABELS = ["cat", "dog", "bird"]


def drawn(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(VisionConfig(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


@pytest.fixture
def folder(tmp_path):
    return ImageClassifier(drawn(), LABELS).save(tmp_path / "vit")


def test_vit_b_16_has_86_million_weights():
    config = VisionConfig(
        image=224, patch=16, classes=1000, hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072
    )
    with init_empty_weights():
        count = sum(parameter.numel() for parameter in VisionTransformer(config).parameters())
    assert count == 86_567_656


def test_a_folder_comes_back_with_its_labels(folder):
    images = torch.randn(2, 2, 8, 8)
    loaded = load_image_classifier(folder)
    require_same_model(loaded.model, drawn(), images)
    for found, row in zip(loaded.classify(images), drawn()(images).softmax(-1).tolist(), strict=True):
        assert found == pytest.approx(dict(zip(LABELS, row, strict=True)))


def test_every_pixel_has_its_own_place():
    images = torch.randn(1, 2, 8, 8)
    logits = drawn()(images)
    for turned in (images.flip(-1), images.roll(4, -1), images.roll(1, -2), images.flip(1)):
        assert not torch.allclose(drawn()(turned), logits)


def test_patches_are_read_row_by_row_as_the_equations_say():
    model, images = drawn(num_layers=1).double(), torch.randn(1, 2, 8, 8, dtype=torch.float64)
    words = []
    for row in range(2):
        for column in range(2):
            patch = images[0, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            words.append(torch.einsum("dcij,cij->d", model.patches.weight, patch) + model.patches.bias)
    rows = torch.stack([model.begin[0, 0], *words]) + model.positions[0]
    expected = model.classifier(model.norm(model.blocks[0](rows[None])[0, 0]))
    torch.testing.assert_close(model(images)[0], expected)


@pytest.mark.parametrize("mechanism", ["linear", "sparsemax"])
def test_any_mechanism_that_sees_both_ways_fits_the_slot(mechanism):
    images = torch.randn(2, 2, 8, 8)
    assert not torch.allclose(drawn(mechanism=mechanism)(images), drawn()(images))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch": 3}, "patch.*divisor of the image's side of 8 pixels"),
        ({"patch": 16}, "divisor"),
        ({"classes": 0}, "classes"),
        ({"channels": 1.5}, "channels"),
        ({"num_heads": 3}, "num_heads"),
        ({"feed_forward": "swish"}, "feed_forward"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, said):
    with pytest.raises(InvalidValue, match=said):
        VisionConfig(**SIZES | changes)


@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 3, 8, 8), (1, 2, 8, 12), (1, 2, 16, 16)])
def test_images_of_another_shape_are_refused(shape):
    with pytest.raises(InvalidValue, match=r"images.*\[batch, 2, 8, 8\]"):
        drawn()(torch.zeros(shape))


def test_a_causal_mechanism_is_refused():
    with pytest.raises(Incompatible, match="mha"):
        drawn(mechanism="lstmn")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"model_type": "bert"}, UnknownName, "vit"),
        ({"hidden_act": "tanh"}, CheckpointInvalid, "hidden_act"),
        ({"qkv_bias": False}, CheckpointInvalid, "qkv_bias"),
        ({"patch_size": 5}, CheckpointInvalid, "divisor"),
        ({"image_size": 12}, CheckpointInvalid, "position_embeddings"),
        ({"id2label": {"0": "cat", "2": "dog", "3": "bird"}}, CheckpointInvalid, "numbered from 0"),
        ({"id2label": {"0": "cat", "1": "cat", "2": "bird"}}, CheckpointInvalid, "3 different ones"),
        ({"id2label": {"0": "cat"}}, CheckpointInvalid, "classifier.weight"),
        ({"num_hidden_layers": 3}, CheckpointInvalid, "encoder.layer.2"),
        ({"num_hidden_layers": 10**9}, CheckpointInvalid, "layers: 1000000000"),
        ({"num_attention_heads": 3}, CheckpointInvalid, "num_heads"),
        ({"num_channels": 3}, CheckpointInvalid, "patch_embeddings.projection.weight"),
        ({"sliding_window": 4}, CheckpointInvalid, "sliding_window"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_what_is_wrong(folder, change, error, said):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folder / "manifest.json").unlink()
    with pytest.raises(error, match=said):
        load_image_classifier(folder)


def test_keys_that_are_not_known_and_code_of_its_own_are_said(folder, caplog):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"frobnicate": 1, "auto_map": {"AutoModel": "x.Y"}}))
    (folder / "manifest.json").unlink()
    load_image_classifier(folder)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert "unknown config keys, which are ignored: frobnicate" in said
    assert "auto_map" in said


def test_weights_that_are_no_numbers_are_refused_by_their_name(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["vit.layernorm.bias"][3] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"vit\.layernorm\.bias"):
        load_image_classifier(folder)


@pytest.mark.oracle
def test_everything_that_transformers_writes_is_understood(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    values = json.loads(transformers.ViTConfig().to_json_string(use_diff=False))
    assert VitAdapter().from_hf_config(values, tmp_path).hidden_size == 768
    assert not [record for record in caplog.records if record.name.startswith("attn_models")]


@pytest.mark.parametrize("changes", [{"mechanism": "sparsemax"}, {"pattern": ("mha", "linear")}, {"head_dim": 8}])
def test_what_transformers_has_no_words_for_comes_back_in_our_layout(tmp_path, changes):
    changes = {k: tuple(AttentionChoice(mechanism=m) for m in v) if k == "pattern" else v for k, v in changes.items()}
    model, images = drawn(**changes), torch.randn(2, 2, 8, 8)
    with pytest.raises(Incompatible):
        VitAdapter().to_hf_config(model.config, LABELS)
    loaded = load_image_classifier(ImageClassifier(model, LABELS).save(tmp_path / "vit"))
    require_same_model(loaded.model, model, images)
    assert loaded.labels == tuple(LABELS)


@pytest.mark.oracle
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_logits_are_those_of_transformers_both_ways(tmp_path, dtype, tolerance):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_channels=2,
        num_labels=3,
    )
    torch.manual_seed(0)
    peer = transformers.ViTForImageClassification(config).to(getattr(torch, dtype)).eval()
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("layernorm" in name and "weight" in name), std=0.2)
    peer.save_pretrained(tmp_path / "theirs")
    ours = load_image_classifier(tmp_path / "theirs", dtype)
    images = torch.randn(3, 2, 8, 8, dtype=getattr(torch, dtype))
    with torch.no_grad():
        theirs = peer(images).logits
        torch.testing.assert_close(ours.model(images), theirs, rtol=0, atol=tolerance)
        ours.save(tmp_path / "ours")
        back = transformers.ViTForImageClassification.from_pretrained(tmp_path / "ours", dtype=getattr(torch, dtype))
        torch.testing.assert_close(back.eval()(images).logits, theirs, rtol=0, atol=tolerance)
    assert back.config.id2label == peer.config.id2label
