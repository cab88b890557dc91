"""CLIP: transformers' vectors of texts and images, pixels read as theirs, and folders that do not fit."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_models.encoder.clip import ClipImage, ClipText
from attn_models.encoder.config import ClipImageConfig, ClipTextConfig
from attn_models.loading.images import ImageEncoder, ImageReader, load_image_encoder, save_clip
from attn_models.loading.sentences import load_sentence_encoder
from attn_models.sources import convert
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_testing.checkpoints import require_same_parameters
from PIL import Image

BLOCKS = {"hidden_size": 24, "num_layers": 2, "num_heads": 3, "intermediate_size": 32, "feed_forward": "quick_gelu"}
TEXT = ClipTextConfig(**BLOCKS, vocab_size=12, max_seq_len=9, size=10, end_id=11, norm_eps=1e-5)
IMAGE = ClipImageConfig(**BLOCKS | {"num_heads": 4}, image=8, patch=4, size=10, norm_eps=1e-5)
WORDS = ["<unk>", *"abcdefghi", "<s>", "</s>"]
TEXTS = ["a b c", "d", "e f g h i", "a a"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = [("<s>", 10), ("</s>", 11)]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, TokenizerSettings(bos_token="<s>", eos_token="</s>", pad_token="</s>"))


def drawn(model):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and "weight" in name), std=0.3)
    return model.eval()


@pytest.fixture
def folder(tokenizer, tmp_path):
    images = ImageEncoder(drawn(ClipImage(IMAGE)), ImageReader(8), scale=5.0)
    return save_clip(tmp_path / "clip", drawn(ClipText(TEXT)), images, tokenizer)


def picture(path, size=(14, 11)):
    torch.manual_seed(sum(size))
    colours = torch.randint(256, (size[1] // 2 + 1, size[0] // 2 + 1, 3), dtype=torch.uint8)
    Image.fromarray(colours.numpy()).resize(size, Image.Resampling.BILINEAR).save(path)
    return path


@pytest.fixture
def pictures(tmp_path):
    sizes = [(14, 11), (11, 30), (8, 8), (5, 7)]
    return [picture(tmp_path / f"{place}.png", size) for place, size in enumerate(sizes)]


def test_a_folder_gives_vectors_of_texts_and_of_images(folder, pictures):
    texts, images = load_sentence_encoder(folder), load_image_encoder(folder)
    require_same_parameters(texts.model, drawn(ClipText(TEXT)))
    require_same_parameters(images.model, drawn(ClipImage(IMAGE)))
    words, seen = texts.embed(TEXTS), images.embed(pictures)
    assert words.shape == seen.shape == (4, 10)
    torch.testing.assert_close(seen.norm(dim=-1), torch.ones(4))
    for text, vector in zip(TEXTS, words, strict=True):
        torch.testing.assert_close(texts.embed([text])[0], vector)
    for path, vector in zip(pictures, seen, strict=True):
        torch.testing.assert_close(images.embed([path])[0], vector)
    likely = images.probabilities(seen, words)
    torch.testing.assert_close(likely, torch.softmax(5.0 * seen @ words.T, -1))
    packed = load_sentence_encoder(folder, quantization="int8").embed(TEXTS)
    assert bool(((packed * words).sum(-1) > 0.99).all())


def test_a_converted_folder_reads_pixels_as_before(folder, pictures, tmp_path):
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.1, 0.2, 0.3]}))
    (folder / "manifest.json").unlink()
    converted = load_image_encoder(convert(folder, tmp_path / "converted", "float32"))
    torch.testing.assert_close(converted.embed(pictures), load_image_encoder(folder).embed(pictures))


def test_what_follows_the_end_of_a_text_changes_nothing():
    model = drawn(ClipText(TEXT))
    rows = model(torch.tensor([[10, 1, 2, 11, 3, 4], [10, 1, 2, 11, 11, 11]]))
    assert torch.equal(rows[0, 3], rows[0, 5])
    assert torch.equal(rows[0], rows[1])
    with pytest.raises(InvalidValue, match="the token 11"):
        model(torch.tensor([[10, 1, 2]]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config_dict": {"hidden_size": 8}}, "text_config_dict"),
        ({"text_config": {"hidden_act": "tanh"}}, "hidden_act"),
        ({"text_config": {"sliding_window": 3}}, "sliding_window"),
        ({"projection_dim": 11}, "text_projection"),
    ],
)
def test_a_tower_of_texts_that_is_not_computed_is_refused(change, said, folder):
    values = json.loads((folder / "config.json").read_text())
    text = change.get("text_config")
    merged = change | ({"text_config": values["text_config"] | text} if text else {})
    (folder / "config.json").write_text(json.dumps(values | merged))
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointInvalid, match=said):
        load_sentence_encoder(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"do_center_crop": False}, "size"),
        ({"resample": 2}, "resample"),
        ({"size": {"shortest_edge": 9}}, "size"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_pixels_that_are_read_otherwise_are_refused(change, said, folder):
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointInvalid, match=said):
        load_image_encoder(folder)


def test_what_is_no_image_is_refused_by_its_place(folder, pictures, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    encoder = load_image_encoder(folder)
    with pytest.raises(InvalidValue, match=r"images\[1\]"):
        encoder.embed([pictures[0], tmp_path / "text.png"])
    with pytest.raises(InvalidValue, match="at least one image"):
        encoder.embed([])


@pytest.mark.oracle
@pytest.mark.parametrize("end", [11, 2])
def test_vectors_and_pixels_are_those_of_transformers_both_ways(end, tokenizer, pictures, tmp_path):
    transformers = pytest.importorskip("transformers")
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    transformers.logging.disable_progress_bar()
    blocks = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    text = {"vocab_size": 12, "max_position_embeddings": 9, "eos_token_id": end, "pad_token_id": 1, "bos_token_id": 10}
    config = transformers.CLIPConfig(
        text_config=blocks | text, vision_config=blocks | {"image_size": 8, "patch_size": 4}, projection_dim=10
    )
    peer = drawn(transformers.CLIPModel(config))
    peer.save_pretrained(tmp_path / "theirs")
    for name, content in tokenizer.files().items():
        given = content if isinstance(content, bytes) else json.dumps(content).encode()
        (tmp_path / "theirs" / name).write_bytes(given)
    processor = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor.save_pretrained(tmp_path / "theirs")
    texts, images = load_sentence_encoder(tmp_path / "theirs"), load_image_encoder(tmp_path / "theirs")
    read = processor([Image.open(path) for path in pictures], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(images.reader.read(pictures), read, rtol=0, atol=1e-5)
    ids = [tokenizer.encode(text) for text in TEXTS]
    longest = max(map(len, ids))
    tokens = torch.tensor([[*row, *[11] * (longest - len(row))] for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in ids])
    save_clip(tmp_path / "ours", texts.model, images, tokenizer)
    with torch.no_grad():
        for their in (peer, transformers.CLIPModel.from_pretrained(tmp_path / "ours").eval()):
            theirs = their(input_ids=tokens, attention_mask=mask, pixel_values=read)
            words, seen = texts.embed(TEXTS), images.embed(pictures)
            torch.testing.assert_close(words, theirs.text_embeds, rtol=0, atol=1e-5)
            torch.testing.assert_close(seen, theirs.image_embeds, rtol=0, atol=1e-5)
            likely = images.probabilities(seen, words)
            torch.testing.assert_close(likely, theirs.logits_per_image.softmax(-1), rtol=0, atol=1e-5)
