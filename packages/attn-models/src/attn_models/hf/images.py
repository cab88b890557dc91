"""Images for models that transformers builds: its processor and vision tower, in attn's prompts and steps.

The processor of the folder expands the prompt, and the model's own `generate` runs up to its text model, where it is
stopped: what the text model is given then, embeddings, positions and masks, is what the engine's steps give it. What a
model gives otherwise is not supported; as for texts, each model is tried when it is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from attn_core import RaggedBatch, installed
from attn_core.errors import AttnError, ContextLengthExceeded, Incompatible, InvalidValue, UserError
from attn_core.models import PromptEmbeddings
from attn_core.stores import StoreSize
from torch import Tensor
from transformers import BatchEncoding
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

from attn_models.hf.causal import CAUGHT, DEEPER, DEEPER_PLACES, TextReachedError, TransformersModel
from attn_models.hf.loading import tolerance
from attn_models.loading.images import PREPROCESSOR, PROCESSOR, open_image
from attn_models.tokenizers import Tokenizer
from attn_models.tokenizers.chat import ControlTokenPlaceholders, Message
from attn_models.tokenizers.settings import CONFIG_NAME
from attn_models.tokenizers.tokenizer import NO_VALUES
from attn_models.tokenizers.vocabulary import LibraryErrors
from attn_models.vision_language.placing import Part, placed_rows
from attn_models.vision_language.prompts import ImagePrompt, ImagePrompts, key_of
from attn_models.weights.safe_files import CONFIG_LIMIT, member, read_json_object

TRIED = ((40, 28), (28, 56))
"""Sizes in pixels of the images with which a model is tried."""
TRIED_TOKENS = 3
"""Tokens that are generated then."""
ALLOWED = {"inputs_embeds", "attention_mask", "position_ids", "cache_position", DEEPER, DEEPER_PLACES}
"""Tensors that text models may be given; what the processor made is, too."""


def transformers_images(model: TransformersModel, folder: Path, tokenizer: Tokenizer) -> ImagePrompts | None:
    """What encodes images for a model, by the processor in its folder; None for a model of texts.

    Where images cannot be computed so, it says why as soon as there are some.
    """
    if type(model.causal).__name__ not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values():
        return None
    try:
        processor = read_processor(folder, model.causal.config)
        made = TransformersImages(model, processor, tokenizer)
        made.require_same_logits()
    except UserError as error:
        return RefusedImages(tokenizer, model, error.message)
    return made


def read_processor(folder: Path, config: Any) -> Any:
    """The processor in a folder, of images and texts alone: those of videos need torchvision.

    Raises `Incompatible` if there is none, and for one that is not transformers' own.
    """
    files = [member(folder, name) for name in (PROCESSOR, PREPROCESSOR, CONFIG_NAME)]
    if not any(path.is_file() for path in files[:2]):
        raise Incompatible(f"the folder has neither {PROCESSOR} nor {PREPROCESSOR}")
    named = [read_json_object(path, CONFIG_LIMIT).get("processor_class") for path in files if path.is_file()]
    name = next((each for each in named if isinstance(each, str)), None)
    with LibraryErrors(lambda said: Incompatible(f"transformers cannot read its processor: {said}")):
        found: Any = processor_class_from_name(name) if name else PROCESSOR_MAPPING.get(type(config), None)
        if found is None:
            raise Incompatible(f"transformers has no processor {name or 'for its type'}")
        attributes = [each for each in found.get_attributes() if each != "video_processor"]
        seeing: Any = type(found.__name__, (found,), {"get_attributes": classmethod(lambda _: attributes)})
        return seeing.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _image_token(model: TransformersModel) -> int:
    config = model.causal.config
    found = [getattr(config, name, None) for name in ("image_token_id", "image_token_index")]
    return next((token for token in found if isinstance(token, int)), -1)


class RefusedImages(ImagePrompts):
    """Encodes conversations without images; raises `Incompatible` with the `reason` for others."""

    in_parts = False

    def __init__(self, tokenizer: Tokenizer, model: TransformersModel, reason: str) -> None:
        super().__init__(tokenizer, _image_token(model))
        self.reason = f"{type(model.causal).__name__} answers to text only here: {reason}"

    def encode(
        self, messages: Sequence[Message], images: Sequence[Sequence[bytes]], values: Mapping[str, Any] = NO_VALUES
    ) -> ImagePrompt:
        """See `ImagePrompts.encode`."""
        if any(images):
            raise Incompatible(self.reason, field="images")
        return ImagePrompt(tuple(self._tokenizer.encode_chat(messages, values)))

    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:  # noqa: ARG002 -- it has no images
        """None."""
        return None


class Tokens:
    """The tokenizer of a processor, whose ids of texts are attn's."""

    def __init__(self, own: Any, encode: Callable[..., list[int]]) -> None:
        self._own = own
        self._encode = encode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __call__(self, text: str | list[str], **given: Any) -> BatchEncoding:
        """The ids of texts, and of what else a processor asks for."""
        texts = [text] if isinstance(text, str) else text
        ids = [self._encode(each, special=given.get("add_special_tokens", True)) for each in texts]
        made = {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}
        if given.get("return_token_type_ids"):
            made["token_type_ids"] = [[0] * len(each) for each in ids]
        return BatchEncoding(made)


class TransformersImages(ImagePrompts):
    """Encodes conversations with images by a processor of transformers, and computes their embeddings by its model."""

    def __init__(self, model: TransformersModel, processor: Any, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, _image_token(model))
        self._model = model
        self._processor = processor
        plain, whole = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
        starts = [at for at in range(len(whole)) if whole[at : at + len(plain)] == plain]
        self._around = (whole[: starts[0]], whole[starts[0] + len(plain) :]) if starts else ([], [])

    def encode(
        self, messages: Sequence[Message], images: Sequence[Sequence[bytes]], values: Mapping[str, Any] = NO_VALUES
    ) -> ImagePrompt:
        """See `ImagePrompts.encode`. Special tokens are added as by transformers' processors, if the template writes no
        token that begins a text."""
        said = self._tokenizer.with_placeholders(self.with_places(messages, images), values)
        text = self._rendered(*said.values)
        data = [one for each in images for one in each]
        if not data:
            return ImagePrompt(tuple(self._ids(said, text)))
        opened = [open_image(one, f"images[{place}]") for place, one in enumerate(data)]
        processor = copy.copy(self._processor)
        processor.tokenizer = Tokens(
            processor.tokenizer, lambda text, *, special: self._ids(said, text, special=special)
        )
        allowed = f"what {type(processor).__name__} takes"
        with LibraryErrors(lambda said: InvalidValue.of("images", f"{len(data)} images", f"{allowed}: {said}")):
            inputs = dict(processor(text=text, images=[opened], return_tensors="pt"))
        ids, context = tuple(inputs["input_ids"][0].tolist()), self._model.max_seq_len
        if len(ids) > context:
            raise ContextLengthExceeded.of(len(ids), 0, context)
        return ImagePrompt(ids, inputs, key_of(images))

    def _rendered(self, messages: Sequence[Message], values: Mapping[str, Any]) -> str:
        return self._tokenizer.render_chat(messages, values, images=True)

    def _ids(self, said: ControlTokenPlaceholders, text: str, *, special: bool = True) -> list[int]:
        begin = self._tokenizer.settings.bos_token
        before, after = self._around if special and not (begin and text.startswith(begin)) else ([], [])
        return [*before, *self._tokenizer.encode_rendered(said, text), *after]

    @torch.inference_mode()
    def embeddings(self, prompt: ImagePrompt) -> PromptEmbeddings | None:
        """See `ImagePrompts.embeddings`; raises `Incompatible` for what the engine's steps cannot give a text model."""
        if prompt.inputs is None:
            return None
        inputs, given = self._on_device(prompt.inputs), dict[str, Any]()
        token = CAUGHT.set(given)
        name = type(self._model.causal).__name__
        try:
            refused = LibraryErrors(lambda said: Incompatible(f"{name} cannot compute images: {said}"))
            with refused, suppress(TextReachedError):
                self._model.causal.generate(**inputs, max_new_tokens=1, do_sample=False)
        finally:
            CAUGHT.reset(token)
        return _given_by(given, inputs, self._model, prompt)

    def _on_device(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parameter = next(self._model.causal.parameters())
        return {
            name: each.to(parameter) if each.is_floating_point() else each.to(parameter.device)
            for name, each in inputs.items()
        }

    @torch.inference_mode()
    def require_same_logits(self) -> None:
        """Allow images, if the logits of steps after a prompt with two are those of transformers' `generate`.

        Raises `Incompatible` otherwise.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        prompt = self.encode([*messages, messages[0]], [[_noise(*TRIED[0])], [], [_noise(*TRIED[1])]])
        given = self.embeddings(prompt)
        if given is None or not given.places:
            raise Incompatible("its images give no embeddings")
        self._model.embedding_size = given.rows.shape[-1]
        try:
            self._require_same_logits(prompt, given)
        except AttnError:
            del self._model.embedding_size
            raise

    def _require_same_logits(self, prompt: ImagePrompt, given: PromptEmbeddings) -> None:
        causal, length = self._model.causal, len(prompt.token_ids)
        fixed = {"do_sample": False, "min_new_tokens": TRIED_TOKENS, "max_new_tokens": TRIED_TOKENS}
        with LibraryErrors(lambda said: Incompatible(f"transformers cannot generate: {said}")):
            wanted = causal.generate(
                **self._on_device(prompt.inputs or {}), **fixed, output_logits=True, return_dict_in_generate=True
            )
        border = given.groups[0][1] if given.groups else given.places[len(given.places) // 4] + 1
        ends = [*sorted({border, length}), *range(length + 1, length + TRIED_TOKENS)]
        found = self._steps(wanted.sequences[0], ends, given)
        for logits, step in zip(found[-TRIED_TOKENS:], wanted.logits, strict=True):
            off = float((logits - step[0].float()).abs().max() / step.float().abs().max().clamp(min=1e-6))
            if not off < tolerance(causal.dtype):
                raise Incompatible(f"logits after images are {off:.1e} off transformers'")

    def _steps(self, tokens: Tensor, ends: Sequence[int], given: PromptEmbeddings) -> list[Tensor]:
        """Logits [vocabulary], float32, of the last token of each chunk of one sequence up to `ends`."""
        model, device, found = self._model, tokens.device, []
        size = StoreSize(tokens=len(tokens), requests=1, dtype=str(model.causal.dtype)[6:], device=str(device))
        store = installed().caches.get("contiguous").create(model.state_specs(), size)
        store.admit(0)
        store.reserve(0, len(tokens))
        for start, end in zip([0, *ends], ends, strict=False):
            batch = RaggedBatch.of((end - start,), (start,), lambda values: torch.tensor(values, device=device))
            part = Part(given, start, end - start, end - start)
            refused = LibraryErrors(lambda said: Incompatible(f"it cannot be stepped after images: {said}"))
            with refused, model.placing(placed_rows([part], batch.positions)):
                hidden = model.step(tokens[start:end], batch, store.view(batch, [0]))
            found.append(model.logits(hidden[-1:])[0].float())
        return found


def _noise(width: int, height: int) -> bytes:
    """A PNG file of random pixels."""
    from PIL import Image

    values = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    file = BytesIO()
    Image.fromarray(values.numpy()).save(file, "PNG")
    return file.getvalue()


def _given_by(
    given: Mapping[str, Any], inputs: Mapping[str, Tensor], model: TransformersModel, prompt: ImagePrompt
) -> PromptEmbeddings:
    """The embeddings, positions and groups that a text model was `given` for a prompt."""
    passed = [id(value) for value in inputs.values()]
    others = [name for name, value in given.items() if _has_tensors(value) and id(value) not in passed]
    refused = sorted({*others} - ALLOWED)
    if refused or given.get("inputs_embeds") is None:
        raise Incompatible(f"its text model is given {', '.join(refused) or 'no embeddings'}, which is not supported")
    rows, ids = given["inputs_embeds"][0], inputs["input_ids"][0]
    embedding = model.causal.get_input_embeddings()
    differs = (rows != embedding(torch.where(ids < embedding.num_embeddings, ids, 0))).any(-1)
    deeper, where = given.get(DEEPER) or (), given.get(DEEPER_PLACES)
    if where is not None:
        where = where.flatten(2).any(-1)[0] if where.ndim > 2 else where[0]
        differs |= where
    parts = [rows, *(torch.zeros_like(rows).index_put((where,), each.to(rows)) for each in deeper)]
    places = differs.nonzero().flatten()
    groups = _groups_of(given.get("attention_mask"))
    key = key_of([[prompt.key.encode()]], prompt.token_ids[: groups[-1][1]]) if groups else prompt.key
    own = _positions_of(given.get("position_ids"), len(ids))
    return PromptEmbeddings(tuple(places.tolist()), torch.cat([part[places] for part in parts], -1), key, own, groups)


def _has_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensors, value)))


def _positions_of(given: Tensor | None, length: int) -> Tensor | None:
    """Rotary positions [axes, tokens]; None for those that count the tokens."""
    if given is None:
        return None
    found = given if given.ndim == 2 else given[:, 0]
    # The first of four axes counts the tokens, for masks of several documents.
    found = found[1:] if len(found) == 4 else found
    return None if bool((found == torch.arange(length, device=found.device)).all()) else found.clone()


def _groups_of(given: Any) -> tuple[tuple[int, int], ...]:
    """The spans of tokens that see each other, by masks [1, 1, query, key], 0 or True where a query sees a key."""
    masks = given.values() if isinstance(given, Mapping) else [given]
    found = set()
    for mask in masks:
        if isinstance(mask, Tensor) and mask.ndim == 4:
            sees_next = mask[0, 0].diagonal(1)
            sees_next = sees_next if mask.dtype == torch.bool else sees_next == 0
            edges = torch.nn.functional.pad(sees_next.int(), (1, 1)).diff()
            starts, ends = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
            found.add(tuple((start, end + 1) for start, end in zip(starts, ends, strict=True)))
    if len(found) > 1:
        raise Incompatible("the masks of its layers group tokens differently")
    return found.pop() if found else ()
