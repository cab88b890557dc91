"""Tiny models of images and text with random weights, and their processors, as transformers writes them to folders."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attn_models.tokenizers.learned import byte_pair_tokenizer
from attn_schema import IMAGE_PLACE, ChatMessage
from PIL import Image
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

SIDE, PATCH = 28, 7
MARKS = (
    *("<s>", "</s>", "<pad>", "<|user|>", "<|end|>", "<image>", "<video>", "<image_placeholder>", "<image_soft_token>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<start_of_image>", "<end_of_image>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>", "<fake_token_around_image>"),
    *(
        "<end_of_utterance>",
        "<global-img>",
        "<|START_OF_IMG|>",
        "<|END_OF_IMG|>",
        "<|IMG_PATCH|>",
        "<|IMG_LINE_BREAK|>",
    ),
    *("TILE", "TILE_GLOBAL", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<IMG_START>"),
    *("<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>"),
    *("<|IMAGE_END|>", "<|begin_of_video|>", "<|end_of_video|>", "<imgpad>"),
)
TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 384,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
TOWER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
TOWER |= {"image_size": SIDE, "patch_size": PATCH}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SQUARE = {"height": SIDE, "width": SIDE}
PADDED = {"size": {"shortest_edge": 4 * PATCH**2, "longest_edge": 48 * PATCH**2}, "patch_size": PATCH, "merge_size": 2}
GRID = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What a type needs: its text and vision configs, further values, the token that stands for an image in a chat, the
    one that is repeated, and the arguments of the image processor and the processor. `named` are tokens that the
    tokenizer names; `like` is the type whose processor it has."""

    text: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=lambda: TOWER)
    config: dict[str, Any] = field(default_factory=dict)
    place: str = "<image>"
    repeated: str = "<image>"
    images: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    like: str = ""


UNTIED = {"tie_word_embeddings": False}
"""With tied embeddings and few layers a model repeats the last token."""
CLIP = {"model_type": "clip_vision_model", **TOWER, "projection_dim": 24}
SIGLIP = {"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False}
PIXTRAL = {"model_type": "pixtral", **TOWER, "head_dim": 8}
LLAMA, QWEN2 = {"model_type": "llama", **TEXT}, {"model_type": "qwen2", **TEXT}
CLIP_IMAGES = {"size": {"shortest_edge": SIDE}, "crop_size": SQUARE}
LLAVA = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
VISION = {"place": "<|vision_start|><|image_pad|><|vision_end|>", "repeated": "<|image_pad|>", "images": PADDED}
INTERN = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
INTERN |= {"video_token": "<video>"}
QWEN3_TOWER = {"hidden_size": 24, "depth": 3, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 32}
QWEN3_TOWER |= {"patch_size": PATCH, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA_TOKENS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GLM_TOWER = {"hidden_size": 24, "depth": 2, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 32}
GLM_TOWER |= {"image_size": SIDE, "patch_size": PATCH}
GLM = {
    "vision": GLM_TOWER,
    "text": TEXT | MROPE,
    "place": "<|begin_of_image|><|image|><|end_of_image|>",
    "repeated": "<|image|>",
    "images": PADDED,
    "named": {"image_token": "<|image|>", "video_token": "<|video|>"},
}
TYPES: dict[str, Tiny] = {
    "aya_vision": Tiny(
        text={"model_type": "cohere2", **TEXT, "sliding_window": 16},
        vision=SIGLIP,
        config={"downsample_factor": 2},
        repeated="<|IMG_PATCH|>",
        images={"size": SQUARE, "max_patches": 3},
        processor={"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
    ),
    "deepseek_vl": Tiny(
        text=LLAMA,
        vision=SIGLIP,
        place="<image_placeholder>",
        repeated="<image_placeholder>",
        images={"size": SQUARE, "min_size": 14},
        processor={"num_image_tokens": 16},
        named={"image_token": "<image_placeholder>"},
    ),
    "gemma3": Tiny(
        text={**TEXT, "head_dim": 8, "sliding_window": 10, "query_pre_attn_scalar": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        config={"mm_tokens_per_image": 16},
        place="<start_of_image>",
        repeated="<image_soft_token>",
        images={"size": SQUARE},
        processor={"image_seq_length": 16},
        named=GEMMA_TOKENS,
    ),
    "glm46v": Tiny(**GLM),
    "glm4v": Tiny(**GLM),
    "glm4v_moe": Tiny(
        **GLM
        | {"text": TEXT | MROPE | {"n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, "like": "glm4v"}
    ),
    "got_ocr2": Tiny(text=QWEN2),
    "idefics2": Tiny(
        text={"model_type": "mistral", **TEXT},
        config={
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            }
        },
        images={"size": {"shortest_edge": 14, "longest_edge": SIDE}, "do_image_splitting": False},
        processor={"image_seq_len": 4},
    ),
    "idefics3": Tiny(
        text=LLAMA,
        config={"scale_factor": 2},
        images={"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        processor={"image_seq_len": 4},
    ),
    "internvl": Tiny(
        text=QWEN2,
        vision=TOWER | {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        config={"image_seq_length": 4},
        place="<IMG_CONTEXT>",
        repeated="<IMG_CONTEXT>",
        images={"size": SQUARE, "max_patches": 3},
        processor={"image_seq_length": 4},
        named=INTERN,
    ),
    "lighton_ocr": Tiny(
        text={"model_type": "qwen3", **TEXT, "head_dim": 8},
        vision=PIXTRAL,
        place="<|image_pad|>",
        repeated="<|image_pad|>",
        images={"size": {"longest_edge": 4 * PATCH}, "patch_size": 2 * PATCH},
        processor={"patch_size": PATCH, "spatial_merge_size": 2},
        named={"image_token": "<|image_pad|>", "image_break_token": "<|vision_end|>", "image_end_token": "</img>"},
    ),
    "llava": Tiny(text=LLAMA, vision=CLIP, images=CLIP_IMAGES, processor=LLAVA),
    "llava_next": Tiny(
        text={"model_type": "mistral", **TEXT, "sliding_window": None},
        vision=CLIP,
        config={"image_grid_pinpoints": GRID},
        images=CLIP_IMAGES | {"image_grid_pinpoints": GRID},
        processor=LLAVA,
    ),
    "llava_onevision": Tiny(
        text=QWEN2,
        vision=SIGLIP,
        config={"image_grid_pinpoints": GRID, "video_token_index": 300},
        images={"size": SQUARE, "image_grid_pinpoints": GRID},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": Tiny(
        text={"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        vision=PIXTRAL,
        place="[IMG]",
        repeated="[IMG]",
        images={"size": {"longest_edge": 4 * PATCH}, "patch_size": 2 * PATCH},
        processor={"patch_size": PATCH, "spatial_merge_size": 2},
    ),
    "ovis2": Tiny(
        text=QWEN2,
        vision=TOWER | {"vocab_size": 64, "hidden_stride": 2},
        config={"hidden_size": 32, "vocab_size": 384, "visual_indicator_token_ids": [301, 302, 303, 304, 305]},
        repeated="<IMG_ATOM>",
        images={"size": SQUARE, "crop_to_patches": False},
        processor={"image_seq_length": 4},
    ),
    "paddleocr_vl": Tiny(
        text=TEXT | MROPE | {"head_dim": 8},
        place="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        repeated="<|IMAGE_PLACEHOLDER|>",
        images=PADDED,
        named={"image_token": "<|IMAGE_PLACEHOLDER|>"},
    ),
    "paligemma": Tiny(
        text={"model_type": "gemma", **TEXT, "head_dim": 8},
        vision=SIGLIP | {"projection_dim": 32},
        config={"projection_dim": 32, "hidden_size": 32},
        images={"size": SQUARE, "image_seq_length": 16},
        named={"image_token": "<image>"},
    ),
    "qwen2_5_vl": Tiny(
        text=TEXT | MROPE,
        vision={"hidden_size": 24, "depth": 2, "num_heads": 3, "intermediate_size": 40, "out_hidden_size": 32}
        | {"patch_size": PATCH, "fullatt_block_indexes": [1], "window_size": SIDE},
        **VISION,
    ),
    "qwen2_vl": Tiny(
        text=TEXT | MROPE,
        vision={"embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2, "hidden_size": 32, "patch_size": PATCH},
        **VISION,
    ),
    "qwen3_5": Tiny(text=TEXT | MROPE | {"head_dim": 8}, vision=QWEN3_TOWER, **VISION),
    "qwen3_vl": Tiny(text=TEXT | MROPE | {"head_dim": 8}, vision=QWEN3_TOWER, **VISION),
    "qwen3_vl_moe": Tiny(text=TEXT | MROPE | EXPERTS | {"head_dim": 8}, vision=QWEN3_TOWER, like="qwen3_vl", **VISION),
    "smolvlm": Tiny(
        text=LLAMA,
        config={"scale_factor": 2},
        images={"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        processor={"image_seq_len": 4},
    ),
    "video_llama_3": Tiny(
        text=QWEN2,
        vision={"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
        | {"patch_size": PATCH},
        images=PADDED,
        named={"image_token": "<image>", "video_token": "<video>"},
    ),
    "vipllava": Tiny(
        text=LLAMA,
        vision=CLIP,
        config={"vision_feature_layers": [-1, -2]},
        images=CLIP_IMAGES,
        processor=LLAVA,
    ),
}
TEMPLATE = (
    "{{{{ bos_token }}}}{{% for message in messages %}}<|user|>{{{{ message['role'] }}}}: "
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{place}{{% else %}}{{{{ part['text'] }}}}"
    "{{% endif %}}{{% endfor %}}{{% endif %}}<|end|>\n{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|user|>assistant: {{% endif %}}"
)


def picture(seed: int, width: int = 40, height: int = 25) -> bytes:
    """The bytes of a PNG file of random pixels."""
    pixels, file = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8), BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def tiny_tokenizer(tiny: Tiny) -> Any:
    """A byte-level tokenizer with the tokens of all types, and a chat template."""
    backend = byte_pair_tokenizer(["what is in the image"], 270).backend
    backend.add_special_tokens(list(MARKS))
    named = {"extra_special_tokens": tiny.named} if tiny.named else {}
    template = TEMPLATE.format(place=tiny.place)
    own = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": template}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **own, **named)


def write_tiny(kind: str, folder: Path) -> tuple[Any, Any]:
    """Write a model and its processor to a folder, and return both; raises what transformers raises."""
    tiny = TYPES[kind]
    tokenizer = tiny_tokenizer(tiny)
    repeated = tokenizer.convert_tokens_to_ids(tiny.repeated)
    ids = {"image_token_id": repeated, "image_token_index": repeated}
    others = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    others |= {"video_token_id": "<|video_pad|>", "boi_token_index": "<start_of_image>"}
    others |= {"eoi_token_index": "<end_of_image>"}
    ids |= {name: tokenizer.convert_tokens_to_ids(token) for name, token in others.items()}
    known = CONFIG_MAPPING[kind]().to_dict()
    attributes = CONFIG_MAPPING[kind].attribute_map
    ids = {name: token for name, token in ids.items() if name in known and name not in attributes}
    config = CONFIG_MAPPING[kind](text_config=tiny.text, vision_config=tiny.vision, **UNTIED, **ids, **tiny.config)
    torch.manual_seed(0)
    found = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    model = found._from_config(config, attn_implementation="eager").eval()  # noqa: SLF001 -- AutoModel's own
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=draw)
        parameter.data = noise * 0.15 if parameter.dim() > 1 else parameter.data + 0.1 * noise
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor = tiny_processor(kind, tokenizer)
    processor.save_pretrained(folder)
    return model, processor


def tiny_processor(kind: str, tokenizer: Any) -> Any:
    """The processor of a type, of images and texts alone: those of videos need torchvision."""
    tiny = TYPES[kind]
    known = IMAGE_PROCESSOR_MAPPING_NAMES[tiny.like or kind]
    images = get_image_processor_class_from_name(known["pil"])(**tiny.images)
    whole = processor_class_from_name(PROCESSOR_MAPPING_NAMES[tiny.like or kind])
    attributes = [each for each in whole.get_attributes() if each != "video_processor"]
    found = type(whole.__name__, (whole,), {"get_attributes": classmethod(lambda _: attributes)})
    given = {"image_processor": images, "tokenizer": tokenizer, **tiny.processor}
    given |= {"video_processor": None} if "video_processor" in inspect.signature(whole).parameters else {}
    return found(**given, chat_template=tokenizer.chat_template)


def chats() -> list[tuple[ChatMessage, ...]]:
    """Conversations with one, other, no and several images, and with a prefix of another one."""
    wide, high, large = picture(1, 40, 25), picture(2, 20, 44), picture(3, 60, 30)

    def asked(content: str, *images: bytes) -> ChatMessage:
        return ChatMessage(role="user", content=content, images=images)

    between = asked(f"see {IMAGE_PLACE} and {IMAGE_PLACE} x", high, large)
    return [
        (asked("what is it", wide),),
        (asked("what is it", high),),
        (asked("what"),),
        (between, ChatMessage(role="assistant", content="y"), asked("z", wide)),
        (asked("what is it now", wide),),
    ]


@torch.inference_mode()
def wanted_tokens(model: Any, processor: Any, chat: Sequence[ChatMessage], new: int = 8) -> list[int]:
    """What transformers generates after a conversation, the likeliest tokens, by its chat template and processor."""
    said = []
    for message in chat:
        before = "" if IMAGE_PLACE in message.content else IMAGE_PLACE * len(message.images)
        parts: list[dict[str, Any]] = []
        files = iter(message.images)
        for number, piece in enumerate((before + message.content).split(IMAGE_PLACE)):
            parts += [{"type": "image", "image": Image.open(BytesIO(next(files)))}] if number else []
            parts += [{"type": "text", "text": piece}] if piece else []
        said.append({"role": message.role, "content": parts})
    if any(message.images for message in chat):
        made = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(said, add_generation_prompt=True, **made)
    else:
        text = processor.apply_chat_template(said, add_generation_prompt=True)
        inputs = {"input_ids": processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}
    out = model.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found
