"""A tiny vision-language model with random weights, its tokenizer, chat template and image settings, for tests."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import torch
from attn_schema.decoder import DecoderConfig

from attn_models.loading import save_model
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.vision_language.config import SiglipConfig, VisionDecoderConfig
from attn_models.vision_language.model import VisionDecoder

SIDE = 18
IMAGE = "<image>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
SPECIAL = ["<|im_start|>", IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *TILES]
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The chat template of published models of this family."""


def vision_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with the special tokens around images."""
    backend = byte_pair_tokenizer(["what is in the image"], 270).backend
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend, TokenizerSettings(chat_template=TEMPLATE, eos_token=SPECIAL[4]))


def write_vision_model(folder: Path, layout: str = "smolvlm", max_seq_len: int = 512) -> Path:
    """Write a model folder and return it; images are resized to 54 pixels on the longer side, in tiles of 18 pixels."""
    tokenizer = vision_tokenizer()
    vision = SiglipConfig(hidden_size=24, num_layers=2, num_heads=3, intermediate_size=40, image=SIDE, patch=3)
    decoder = DecoderConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        intermediate_size=48,
        vocab_size=tokenizer.vocab_size,
        max_seq_len=max_seq_len,
        mechanism="attn-variants/gqa",
        norm="rms",
        feed_forward="swiglu",
        positions="rotary",
        bias=False,
    )
    (image_token,) = tokenizer.encode(IMAGE, add_special=False)
    torch.manual_seed(3)
    model = VisionDecoder(VisionDecoderConfig.of(decoder, vision, image_token, scale_factor=3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name), std=0.25)
    save_model(folder, model, tokenizer, layout=layout)
    settings = {
        "size": {"longest_edge": 3 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def picture(seed: int, width: int = 40, height: int = 25, form: str = "PNG") -> bytes:
    """The bytes of an image file of random pixels."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()
