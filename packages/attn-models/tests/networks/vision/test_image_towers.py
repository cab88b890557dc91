"""SigLIP and DINOv2 as transformers writes them: vectors of images and of texts, pixels, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from attn_core.errors import CheckpointInvalid, Incompatible
from attn_models.encoder.config import ImageEncoderConfig
from attn_models.loading.encoders import build_encoder
from attn_models.loading.images import load_image_encoder, read_preprocessor
from attn_models.weights import read_folder
from PIL import Image
from torch.nn.functional import normalize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.oracle

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
SIGLIP = {
    "text_config": SIZES | {"vocab_size": 31, "max_position_embeddings": 12, "projection_size": 24},
    "vision_config": SIZES | {"num_attention_heads": 4, "image_size": 17, "patch_size": 4},
}
DINO = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 20, "patch_size": 4}
FAMILIES = {
    "siglip": ("siglip", SIGLIP),
    "dinov2": ("dinov2", DINO),
    "dinov2 giant": ("dinov2", DINO | {"use_swiglu_ffn": True, "mlp_ratio": 3}),
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
PROCESSORS = {
    "siglip": ("SiglipImageProcessorPil", {"size": {"height": 17, "width": 17}}),
    "dinov2": (
        "BitImageProcessorPil",
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 12, "width": 12}} | IMAGENET,
    ),
}


def drawn(family):
    """A model of transformers in which every weight counts."""
    torch.manual_seed(0)
    model_type, sizes = FAMILIES[family]
    peer = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(model_type, **sizes))
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            parameter.normal_(mean=float("norm" in name.lower() and "weight" in name), std=0.3)
    return peer.eval()


def processor(family):
    name, settings = PROCESSORS[FAMILIES[family][0]]
    return getattr(transformers, name)(**settings)


@pytest.fixture(params=FAMILIES)
def both(request, tmp_path):
    """The model of transformers, its images' processor, and their folder."""
    peer, reads = drawn(request.param), processor(request.param)
    peer.save_pretrained(tmp_path)
    reads.save_pretrained(tmp_path)
    return peer, reads, tmp_path


def picture(path, size):
    torch.manual_seed(sum(size))
    colours = torch.randint(256, (size[1] // 2 + 1, size[0] // 2 + 1, 3), dtype=torch.uint8)
    Image.fromarray(colours.numpy()).resize(size, Image.Resampling.BILINEAR).save(path)
    return path


def their_images(peer, pixels):
    found = peer.get_image_features(pixels) if hasattr(peer, "get_image_features") else peer(pixels)
    return normalize(found.pooler_output, dim=-1)


@torch.no_grad()
def test_vectors_of_image_files_are_those_of_transformers(both, tmp_path):
    peer, reads, folder = both
    paths = [picture(tmp_path / f"{place}.png", size) for place, size in enumerate([(31, 23), (18, 40), (17, 17)])]
    pixels = reads([Image.open(path) for path in paths], return_tensors="pt").pixel_values
    ours = load_image_encoder(folder)
    torch.testing.assert_close(ours.reader.read(paths), pixels, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.embed(paths), their_images(peer, pixels), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_vectors_are_exact_in_float64(both):
    peer, _, folder = both
    side = peer.config.image_size if hasattr(peer.config, "image_size") else 17
    images = torch.randn(3, 3, side, side, dtype=torch.float64)
    found = load_image_encoder(folder, "float64").model(images)
    theirs = their_images(peer.double(), images)
    torch.testing.assert_close(normalize(found, dim=-1), theirs, rtol=0, atol=1e-10)


@torch.no_grad()
def test_texts_of_siglip_and_their_probabilities_are_those_of_transformers(tmp_path):
    peer = drawn("siglip")
    peer.save_pretrained(tmp_path)
    processor("siglip").save_pretrained(tmp_path)
    tokens, lengths = torch.randint(2, 31, (3, 9)), torch.tensor([[9], [4], [1]])
    keep = torch.arange(9) < lengths
    padded = torch.nn.functional.pad(tokens.masked_fill(~keep, 1), (0, 3), value=1)
    images = torch.randn(2, 3, 17, 17)
    theirs = peer(input_ids=padded, pixel_values=images)
    texts = normalize(build_encoder(read_folder(tmp_path), torch.float32).eval()(tokens, keep)[:, -1], dim=-1)
    torch.testing.assert_close(texts, theirs.text_embeds, rtol=1e-4, atol=1e-5)
    encoder = load_image_encoder(tmp_path)
    likely = encoder.probabilities(encoder.embed(images), texts)
    torch.testing.assert_close(likely, theirs.logits_per_image.sigmoid(), rtol=1e-3, atol=1e-5)


def test_a_model_without_texts_has_no_probabilities(tmp_path):
    drawn("dinov2").save_pretrained(tmp_path)
    processor("dinov2").save_pretrained(tmp_path)
    with pytest.raises(Incompatible, match="no tower"):
        load_image_encoder(tmp_path).probabilities(torch.ones(1, 24), torch.ones(1, 24))


@pytest.mark.parametrize(
    ("family", "values", "said"),
    [
        ("siglip", {"vision_config": {"vision_use_head": False}}, "vision_use_head"),
        ("siglip", {"vision_config": {"hidden_act": "tanh"}}, "hidden_act"),
        ("dinov2", {"qkv_bias": False}, "qkv_bias"),
        ("dinov2", {"mlp_ratio": 0}, "mlp_ratio"),
    ],
)
def test_a_tower_that_is_not_computed_is_refused(family, values, said, tmp_path):
    drawn(family).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    known = json.loads(path.read_text())
    for key, value in values.items():
        known[key] = known[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(known))
    with pytest.raises(CheckpointInvalid, match=said):
        load_image_encoder(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"size": {"height": 17, "width": 18}}, "size"),
        ({"size": {"height": 16, "width": 16}, "do_center_crop": True}, "crop_size|size"),
        ({"resample": 2}, "resample"),
        (None, "preprocessor_config"),
    ],
)
def test_pixels_that_are_read_otherwise_are_refused(values, said, tmp_path):
    config = ImageEncoderConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size"), 24),
        num_layers=1,
        num_heads=3,
        image=17,
        patch=4,
        class_token=False,
    )
    if values is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointInvalid, match=said):
        read_preprocessor(tmp_path, config)
