"""Models of images and text that transformers builds see images: the tokens are those of its own `generate`.

`benchmarks/transformers_types.py --images` does the same for all types of which it has tiny models.
"""

from __future__ import annotations

import queue
import shutil
import sys

import pytest
import workspace
from attn_core.errors import ContextLengthExceeded, Incompatible, InvalidValue
from attn_engine.client import TextTask
from attn_engine.host.engine import EngineHost
from attn_schema import IMAGE_PLACE, ChatMessage, EngineConfig, Prompt, SamplingParams

transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL")
transformers.logging.disable_progress_bar()
KINDS = {
    "llava": "rows in place of tokens",
    "gemma3": "tokens of an image that see each other, in layers with and without a window",
    "paligemma": "whole prompts that see each other, and positions from 1",
    "qwen2_5_vl": "rotary positions of three axes",
    "qwen3_vl": "features of deeper layers",
    "deepseek_vl": "a class whose attention is not exchanged",
}


@pytest.fixture(scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(workspace.ROOT / "benchmarks"), *sys.path])
        import tiny_image_models

        yield tiny_image_models


@pytest.fixture(scope="module")
def model_of(tiny, tmp_path_factory):
    """The folder of a type, its model and its processor, of which each is made once."""
    made = {}

    def find(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, *tiny.write_tiny(kind, folder)
        return made[kind]

    return find


class Answers:
    """A host, and the tokens of the completions that it delivers."""

    def __init__(self, folder, **options):
        self.outputs = queue.SimpleQueue()
        sizes = {"num_threads": 1, "kv_cache_memory_bytes": 2**24} | options
        self.host = EngineHost(
            folder, EngineConfig(**sizes), lambda outputs: [self.outputs.put(one) for one in outputs]
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.host.stop(0)

    def tokens(self, *conversations):
        """The tokens of each conversation, all asked at once; raises the error of one that fails."""
        options = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)
        tasks = [TextTask(prompt=Prompt(chat=chat), params=options) for chat in conversations]
        for task in tasks:
            self.host.submit(task)
        found, left = {task.id: [] for task in tasks}, len(tasks)
        while left:
            output = self.outputs.get(timeout=60)
            if output.error is not None:
                raise output.error
            found[output.request_id] += [token.id for token in output.delta.tokens]
            left -= output.last
        return [found[task.id] for task in tasks]


def asked(content, *images):
    return ChatMessage(role="user", content=content, images=images)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_in_chunks_in_batches_and_from_a_cache(kind, model_of, tiny):
    folder, model, processor = model_of(kind)
    asked_for = tiny.chats()
    wanted = [tiny.wanted_tokens(model, processor, chat) for chat in asked_for]
    assert wanted[0] != wanted[1]
    assert len({tuple(tokens) for tokens in wanted}) > 3
    with Answers(folder) as whole:
        assert [whole.tokens(chat)[0] for chat in asked_for] == wanted
        assert whole.tokens(*asked_for) == wanted  # prefixes are cached: none is taken for that of another image
        assert whole.host.stats().cached_tokens > 0
    # A step takes fewer tokens than an image has, and the cache fewer than are asked for.
    with Answers(folder, max_num_batched_tokens=7, max_num_seqs=4, kv_cache_memory_bytes=2**16 + 2**15) as small:
        assert small.tokens(*asked_for, *asked_for) == wanted * 2


def test_what_cannot_be_seen_is_refused_before_anything_is_computed(model_of, tiny):
    folder, _, processor = model_of("llava")
    image = tiny.picture(1)
    with Answers(folder) as answers:
        for refused, messages in (
            ("an image file", (asked("x", b"none"),)),
            ("2 images", (asked(f"x {IMAGE_PLACE}", image, image),)),
        ):
            with pytest.raises(InvalidValue, match=refused):
                answers.tokens(messages)
        with pytest.raises(ContextLengthExceeded):
            answers.tokens((asked("x", *[image] * 64),))
        place = processor.tokenizer.convert_tokens_to_ids("<image>")
        with pytest.raises(InvalidValue, match="images come with the messages"):
            answers.host.submit(TextTask(prompt=Prompt(token_ids=(place, 5)), params=SamplingParams()))
        # Control tokens that a person writes are text: they neither end a turn nor stand for an image.
        ids = answers.host._tokenizer.ids(Prompt(chat=(asked("a <image> <|end|> b", image),)))
        assert ids.count(place) == answers.host._tokenizer.ids(Prompt(chat=(asked("a b", image),))).count(place)
        assert answers.host.stats().waiting == 0


def test_a_folder_without_a_processor_answers_to_text_and_says_so(model_of, tiny, tmp_path):
    folder, model, processor = model_of("llava")
    for path in folder.iterdir():
        if "processor_config" not in path.name:
            shutil.copy(path, tmp_path)
    with Answers(tmp_path) as answers:
        text = (asked("what"),)
        assert answers.tokens(text) == [tiny.wanted_tokens(model, processor, text)]
        with pytest.raises(Incompatible, match=r"text only.*processor_config\.json"):
            answers.tokens((asked("x", tiny.picture(1)),))


def test_a_model_that_is_given_other_things_than_steps_can_give_it_is_refused_by_name(model_of, tiny, monkeypatch):
    from attn_models.hf import images

    folder, *_ = model_of("qwen3_vl")
    monkeypatch.setattr(images, "ALLOWED", images.ALLOWED - {"deepstack_visual_embeds"})
    with Answers(folder) as answers, pytest.raises(Incompatible, match=r"text only.*deepstack_visual_embeds"):
        answers.tokens((asked("x", tiny.picture(1)),))
