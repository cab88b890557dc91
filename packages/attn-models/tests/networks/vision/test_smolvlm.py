"""SmolVLM and Idefics3: pixels, prompts, rows of images and logits are those of transformers."""

from __future__ import annotations

import dataclasses
import json
from io import BytesIO

import pytest
import torch
from attn_core.errors import CheckpointInvalid, ContextLengthExceeded, Incompatible, InvalidValue
from attn_models.loading import load_model, save_model
from attn_models.vision_language.example import SIDE, picture, vision_tokenizer, write_vision_model
from attn_models.vision_language.images import TileReader, read_tile_reader
from attn_models.vision_language.model import VisionDecoder
from attn_models.vision_language.prompts import MOST_IMAGES, TilePrompts
from attn_schema import IMAGE_PLACE

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
KINDS = ("smolvlm", "idefics3")
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 54,
    "patch_size": 9,
}


def peer_of(kind, text=(), tower=(), **others):
    """A random model of transformers, every weight far from its initial value so that each one counts."""
    torch.manual_seed(0)
    values = {"image_token_id": 60, "scale_factor": 3} | others
    parts = {"text_config": TEXT | dict(text), "vision_config": TOWER | dict(tower)}
    config = transformers.AutoConfig.for_model(kind, **parts, **values)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.2)
    return model


def seen(peer, side, tokens_per_image):
    """Three images, a prompt of them, and the logits of transformers."""
    pixels, ids = torch.randn(3, 3, side, side), torch.randint(60, (14 + 3 * tokens_per_image,))
    for image in range(3):
        begin = 3 + image * (tokens_per_image + 2)
        ids[begin : begin + tokens_per_image] = 60
    with torch.no_grad():
        return pixels, ids, peer(input_ids=ids[None], pixel_values=pixels[None]).logits[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"tie_word_embeddings": True},
        {"scale_factor": 2},
        {"text": {"rms_norm_eps": 1e-2, "rope_theta": 500.0, "head_dim": 12}},
        {"text": {"attention_bias": True, "mlp_bias": True}},
        {"tower": {"hidden_act": "relu", "layer_norm_eps": 0.1, "patch_size": 3}},
        {"tower": {"image_size": 81, "patch_size": 3}},
    ],
    ids=["plain", "tied", "scale", "rotary", "biases", "activation", "27 patches a side"],
)
def test_a_checkpoint_of_transformers_gives_its_logits_and_is_written_back(kind, changed, tmp_path):
    peer = peer_of(kind, **changed)
    peer.save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs").model
    tower = model.config.vision
    pixels, ids, wanted = seen(peer, tower.image, model.config.tokens_per_tile)
    with torch.no_grad(), model.seeing(ids[None], pixels[None]):
        logits = model(ids[None])[0]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=2e-5)
    save_model(tmp_path / "ours", model)
    again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        found = again.eval()(input_ids=ids[None], pixel_values=pixels[None]).logits[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("changed", [{"patch": 1}, {"patch": 2}, {"image": 36}])
def test_embeddings_that_fit_no_image_tokens_of_the_prompt_are_refused(changed, tmp_path):
    model = load_model(write_vision_model(tmp_path / "model")).model
    fitting, config = model.config.tokens_per_tile, model.config
    other = VisionDecoder(dataclasses.replace(config, vision=dataclasses.replace(config.vision, **changed)))
    tokens = torch.tensor([1, *[config.image_token_id] * fitting, 2])
    pixels = torch.zeros(1, 3, other.config.vision.image, other.config.vision.image)
    with torch.no_grad(), pytest.raises(InvalidValue) as refused, other.seeing(tokens[None], pixels[None]):
        pass
    assert refused.value.metadata["field"] == "images"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_factor", 4),
        ("scale_factor", None),
        ("image_token_id", 61),
        ("text_config", None),
        ("text_config.model_type", "qwen2"),
        ("text_config.hidden_act", "gelu"),
        ("text_config.tie_word_embeddings", True),
        ("vision_config", None),
        ("vision_config.hidden_act", "swish"),
        ("vision_config.attention_dropout", 0.1),
        ("vision_config.patch_size", 10),
        ("vision_config.image_size", [54, 54]),
        ("vision_config.num_attention_heads", 5),
    ],
)
def test_a_setting_that_is_not_understood_is_refused_by_name(key, value, tmp_path):
    peer_of("smolvlm").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    *parts, last = key.split(".")
    inner = values[parts[0]] if parts else values
    inner[last] = value
    path.write_text(json.dumps(values))
    named = {"patch_size": "patch"}.get(last, last)
    with pytest.raises(CheckpointInvalid, match=named):
        load_model(tmp_path)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("size", [(100, 60), (31, 97), (500, 20), (54, 54), (10, 10), (1, 300), (333, 777)])
def test_pixels_of_tiles_are_those_of_transformers_to_the_bit(size, split):
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    data = picture(1, *size)
    settings = {"size": {"longest_edge": 160}, "max_image_size": {"longest_edge": 54}, "do_image_splitting": split}
    theirs = Idefics3ImageProcessorPil(**settings)(
        [Image.open(BytesIO(data))], return_tensors="pt", return_row_col_info=True
    )
    ours = TileReader(side=54, longest_edge=160, split=split).read(data)
    assert torch.equal(ours.pixels, theirs["pixel_values"][0])
    assert [[ours.rows]] == theirs["rows"]
    assert [[ours.columns]] == theirs["cols"]


@pytest.fixture
def folder(tmp_path):
    return write_vision_model(tmp_path / "model")


@pytest.fixture
def prompts(folder):
    loaded = load_model(folder)
    return TilePrompts(loaded.tokenizer, loaded.model, read_tile_reader(folder, SIDE))


def test_prompts_are_those_of_transformers(prompts, folder):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    images = Idefics3ImageProcessorPil(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE})
    processor = transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=4, chat_template=vision_tokenizer().settings.chat_template
    )
    first, second = picture(1), picture(2, 20, 60)
    text = {"type": "text", "text": "what is in the image"}
    theirs = processor.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "image"}, text]},
            {"role": "assistant", "content": [text]},
            {"role": "user", "content": [text, {"type": "image"}, text]},
        ],
        add_generation_prompt=True,
    )
    both = [Image.open(BytesIO(data)).convert("RGB") for data in (first, second)]
    wanted = processor(text=theirs, images=[both], return_tensors="pt")
    said = "what is in the image"
    ours = prompts.encode(
        [
            {"role": "user", "content": said},
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"{said}{IMAGE_PLACE}{said}"},
        ],
        [[first], [], [second]],
    )
    assert list(ours.token_ids) == wanted["input_ids"][0].tolist()
    assert torch.equal(ours.inputs["pixels"], wanted["pixel_values"][0])
    assert len(prompts.embeddings(ours).places) == 4 * len(ours.inputs["pixels"])


def test_a_person_cannot_write_the_tokens_that_stand_for_images(prompts):
    spelled = "<image><fake_token_around_image><global-img>"
    found = prompts.encode([{"role": "user", "content": spelled}], [[]])
    assert found.inputs is None
    assert prompts.embeddings(found) is None


def test_wrong_images_and_places_are_refused(prompts):
    def encode(content, *images):
        return prompts.encode([{"role": "user", "content": content}], [images])

    with pytest.raises(InvalidValue, match=r"images\[1\].*an image file"):
        encode("x", picture(1), b"no image")
    with pytest.raises(InvalidValue, match=r"messages\[0\]\.images: .2 images. .* one for each place"):
        encode(f"x{IMAGE_PLACE}", picture(1), picture(2))
    with pytest.raises(InvalidValue, match=f"at most {MOST_IMAGES} in a conversation"):
        encode("x", *[b""] * (MOST_IMAGES + 1))
    with pytest.raises(InvalidValue, match="images come with the messages"):
        prompts.require_none([5, vision_tokenizer().id("<image>")])


def test_images_beyond_the_context_are_refused_before_the_next_one_is_read(prompts):
    with pytest.raises(ContextLengthExceeded, match="the context of 512 tokens"):
        prompts.encode([{"role": "user", "content": "x"}], [[picture(1, 40, 40)] * 20 + [b"not read"]])


def test_a_template_that_shows_no_images_and_a_vocabulary_without_their_tokens_are_refused(folder):
    loaded = load_model(folder)
    reader = read_tile_reader(folder, SIDE)
    loaded.tokenizer.settings.__dict__["chat_template"] = "{{ messages[0]['content'][-1]['text'] }}"
    blind = TilePrompts(loaded.tokenizer, loaded.model, reader)
    with pytest.raises(Incompatible, match="renders 0 of 1 images"):
        blind.encode([{"role": "user", "content": "x"}], [[picture(1)]])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resample", 3),
        ("max_image_size", {"longest_edge": 20}),
        ("rescale_factor", 1.0),
        ("do_normalize", False),
        ("size", {"height": 4, "width": 4}),
        ("image_mean", [0.5]),
        ("do_something_else", True),
    ],
)
def test_other_settings_of_images_are_refused_by_name(folder, key, value):
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(CheckpointInvalid, match=key):
        read_tile_reader(folder, SIDE)
