"""A model that sees images answers with the tokens of transformers, however its prompts are computed."""

from __future__ import annotations

import queue
from io import BytesIO

import pytest
import torch
from attn_core.errors import Incompatible, InvalidValue, OutOfCapacity
from attn_engine.client import TextTask
from attn_engine.host import image_rows
from attn_engine.host.engine import EngineHost
from attn_engine.host.ranks import require_tensor_parallel
from attn_models.vision_language.example import SIDE, picture, vision_tokenizer, write_vision_model
from attn_schema import IMAGE_PLACE, AttentionMapsRequest, ChatMessage, EngineConfig, Prompt, SamplingParams

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
NEW = 12


@pytest.fixture
def folder(tmp_path):
    return write_vision_model(tmp_path / "model")


class Answers:
    """A host, and the tokens of the completions that it delivers."""

    def __init__(self, folder, **options):
        self.outputs = queue.SimpleQueue()
        sizes = {"num_threads": 1, "kv_cache_memory_bytes": 2**24} | options
        self.host = EngineHost(
            folder, EngineConfig(**sizes), lambda outputs: [self.outputs.put(one) for one in outputs]
        )

    def tokens(self, *conversations, **params):
        """The tokens of each conversation, all asked at once; raises the error of one that fails."""
        options = SamplingParams(max_new_tokens=NEW, ignore_eos=True, **params)
        tasks = [TextTask(prompt=Prompt(chat=chat), params=options) for chat in conversations]
        for task in tasks:
            self.host.submit(task)
        found, ended = {task.id: {} for task in tasks}, 0
        while ended < len(tasks):
            output = self.outputs.get(timeout=60)
            if output.error is not None:
                raise output.error
            made = found[output.request_id].setdefault(output.delta.index, [])
            made += [token.id for token in output.delta.tokens]
            ended += output.last
        return [[made for _, made in sorted(found[task.id].items())] for task in tasks]


@pytest.fixture
def answers(folder):
    made = []

    def start(**options):
        made.append(Answers(folder, **options))
        return made[-1]

    yield start
    for one in made:
        one.host.stop(0)


def asked(content, *images, role="user"):
    return ChatMessage(role=role, content=content, images=images)


def theirs(folder, messages):
    """The greedy tokens of transformers after a conversation whose images come before the texts."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = Idefics3ImageProcessorPil(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE})
    template = vision_tokenizer().settings.chat_template
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    peer = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    parts = [
        {"role": m.role, "content": [{"type": "image"}] * len(m.images) + [{"type": "text", "text": m.content}]}
        for m in messages
    ]
    text = processor.apply_chat_template(parts, add_generation_prompt=True)
    opened = [Image.open(BytesIO(data)).convert("RGB") for m in messages for data in m.images]
    inputs = processor(text=text, images=[opened] if opened else None, return_tensors="pt")
    with torch.no_grad():
        made = peer.generate(
            **inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return made[0, inputs["input_ids"].shape[1] :].tolist()


ONE = (asked("what is it", picture(1)),)
OTHER = (asked("what is it", picture(2)),)
TWO = (asked("x", picture(3, 20, 60)), asked("y", role="assistant"), asked("z", picture(1)))


def test_tokens_are_those_of_transformers_in_chunks_in_a_batch_and_from_a_cache(folder, answers):
    wanted = [theirs(folder, conversation) for conversation in (ONE, OTHER, TWO)]
    assert len({tuple(tokens) for tokens in wanted}) == 3
    whole = answers()
    assert [whole.tokens(one)[0][0] for one in (ONE, OTHER, TWO)] == wanted
    chunked = answers(max_num_batched_tokens=7, max_num_seqs=4)
    assert [made[0] for made in chunked.tokens(ONE, OTHER, TWO, ONE)] == [*wanted, wanted[0]]
    # Equal tokens before other images: what is cached of one must not be taken for the other.
    before = chunked.host.stats().cached_tokens
    assert [made[0] for made in chunked.tokens(OTHER, ONE)] == [wanted[1], wanted[0]]
    assert chunked.host.stats().cached_tokens > before


def test_preempted_and_forked_sequences_see_the_same_images(folder, answers):
    alone = [answers().tokens(one)[0][0] for one in (ONE, OTHER, TWO)]
    small = answers(kv_cache_memory_bytes=2**17)
    assert [made[0] for made in small.tokens(ONE, OTHER, TWO)] == alone
    assert small.tokens(ONE, n=3, temperature=1.0, seed=5) == answers().tokens(ONE, n=3, temperature=1.0, seed=5)


def test_images_that_cannot_be_seen_are_refused_before_anything_is_computed(answers, folder, monkeypatch):
    host = answers().host

    def submit(*messages, **others):
        prompt = Prompt(chat=messages) if messages else Prompt(**others)
        host.submit(TextTask(prompt=prompt, params=SamplingParams(max_new_tokens=1)))

    with pytest.raises(InvalidValue, match="an image file"):
        submit(asked("x", b"none"))
    with pytest.raises(InvalidValue, match="images come with the messages"):
        submit(token_ids=(vision_tokenizer().id("<image>"), 5))
    monkeypatch.setattr(image_rows, "MAX_BYTES", 0)
    with pytest.raises(OutOfCapacity, match="the image embeddings"):
        submit(asked("x", picture(1)))
    assert host.stats().waiting == 0


def test_attention_maps_of_a_prompt_with_images_are_refused_not_those_of_its_text(answers):
    with pytest.raises(Incompatible, match="images"):
        answers().host.attention_maps(AttentionMapsRequest(model="x", prompt=Prompt(chat=ONE)))


def test_the_text_of_a_conversation_shows_where_its_images_stand(answers):
    host = answers().host
    assert "User:<image>what is it<end" in host.tokenize(Prompt(chat=ONE)).text
    named = host.tokenize(Prompt(chat=(asked(f"see {IMAGE_PLACE}here", picture(1)),))).text
    assert "User: see <image>here<end" in named


def test_a_model_that_sees_is_not_split_over_ranks(folder):
    with pytest.raises(InvalidValue, match=r"tensor_parallel_size.*VisionDecoder"):
        require_tensor_parallel(folder, EngineConfig(tensor_parallel_size=2))


def test_the_rows_of_images_of_requests_that_ended_are_gone(answers):
    one = answers()
    one.tokens(ONE, OTHER)
    one.tokens(ONE)
    held = [reference() for reference in one.host._images._held]
    assert sum(rows is not None for rows in held) <= 1
