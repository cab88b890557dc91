"""Conversations and preferences with images: losses of transformers, published shapes, and what is refused."""

from __future__ import annotations

import base64
import json
import math
import queue
import re
from io import BytesIO

import pytest
import torch
from attn_core.errors import InvalidValue
from attn_engine.client import TextTask
from attn_engine.host.engine import EngineHost
from attn_models.adapters.registry import decoder_adapter
from attn_models.evaluation import IGNORED
from attn_models.vision_language.example import SIDE, picture, vision_tokenizer, write_vision_model
from attn_schema import IMAGE_PLACE, ChatMessage, EngineConfig, Prompt, SamplingParams
from attn_schema.prepared import ShowConfig
from attn_schema.training import (
    DataConfig,
    EvaluationConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    TrainingConfig,
)
from attn_train.base_model import load_base
from attn_train.data.conversations import checked_chats, checked_preferences, read_chats, rows_in
from attn_train.data.load import data_digest, load_dataset
from attn_train.data.pictures import tiles_in
from attn_train.data.preview import preview, shown
from attn_train.data.reading import Reading
from attn_train.records import StopFlag
from attn_train.trainer import Trainer

transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

HIGH, WIDE = picture(1, 20, 60), picture(2, 70, 30)
NO_IMAGE = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def asked(*parts, answer="it is a picture"):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


IMAGE = {"type": "image"}
TALKS = [
    {"messages": asked(IMAGE, "what is in ", IMAGE), "images": ["high.png", "wide.png"]},
    {"messages": asked("see ", IMAGE, answer="yes") + asked(IMAGE, "and now", answer="no"), "images": ["wide.png"] * 2},
    NO_IMAGE,
]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "high.png").write_bytes(HIGH)
    (folder / "wide.png").write_bytes(WIDE)

    def write(*rows):
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "a.jsonl"

    return write


def configured(folder, data, kind="chat", **others):
    return TrainingConfig(
        model=ModelConfig(base_model=str(folder), max_seq_len=256),
        data=DataConfig(dataset=str(data), format=kind, tokenizer=str(folder), validation_fraction=0.0),
        optimizer=OptimizerConfig(**{"steps": 3, "batch_size": 3, "learning_rate": 1e-2} | others.pop("optimizer", {})),
        evaluation=EvaluationConfig(logging_steps=1),
        **others,
    )


def inputs_of_transformers(folder, row):
    """The tensors of transformers' processor for a row, and labels by their places in the text alone."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    images = Idefics3ImageProcessorPil(size={"longest_edge": 3 * SIDE}, max_image_size={"longest_edge": SIDE})
    template = vision_tokenizer().settings.chat_template
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    files = {"high.png": HIGH, "wide.png": WIDE}
    opened = [Image.open(BytesIO(files[name])).convert("RGB") for name in row.get("images", [])]
    parts = [
        one
        | {"content": [{"type": "text", "text": one["content"]}] if isinstance(one["content"], str) else one["content"]}
        for one in row["messages"]
    ]
    text = processor.apply_chat_template(parts)
    inputs = processor(text=text, images=[opened] if opened else None, return_tensors="pt")
    labels = torch.full_like(inputs["input_ids"], IGNORED)
    ids, asks = inputs["input_ids"][0].tolist(), tokenizer.encode("Assistant:", add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids("<end_of_utterance>")
    for place in range(len(ids)):
        if ids[place : place + len(asks)] == asks:
            begin, stop = place + len(asks), ids.index(end, place) + 1
            labels[0, begin:stop] = inputs["input_ids"][0, begin:stop]
    return inputs | {"labels": labels}


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["smolvlm", "idefics3"])
def test_loss_and_gradients_of_a_step_are_those_of_transformers(kind, tmp_path, data):
    folder = write_vision_model(tmp_path / "model", layout=kind)
    config = configured(folder, data(*TALKS))
    task = load_dataset(config, tmp_path, print).task(config)
    ours = load_base(config, tmp_path, print).model
    loss = task.loss(ours, task.next_batch())
    loss.backward()
    peer = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    made = [inputs_of_transformers(folder, row) for row in TALKS]
    counts = [int((one["labels"] != IGNORED).sum()) for one in made]
    losses = [peer(**one).loss * count / sum(counts) for one, count in zip(made, counts, strict=True)]
    sum(losses).backward()
    torch.testing.assert_close(loss, sum(losses), rtol=1e-5, atol=1e-6)
    adapter, theirs = decoder_adapter(kind), dict(peer.named_parameters())
    trained = {name: one for name, one in ours.named_parameters() if not name.startswith("vision.")}
    assert "connector.weight" in trained
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, theirs[adapter.hf_name(name)].grad, rtol=1e-3, atol=1e-5, msg=name)
    assert all(one.grad is None for one in ours.vision.parameters())


def preferred(question, image, *, chosen, rejected):
    answers = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", chosen), ("rejected", rejected))
    }
    return {"prompt": asked(IMAGE, question)[:1], **answers, "images": [image]}


PAIRS = [
    preferred("what is in it", "high.png", chosen="it is a picture", rejected="yes"),
    preferred("what is in it", "wide.png", chosen="no", rejected="what is it"),
]


def judging(folder, data, loss, lora):
    others = {"objective": ObjectiveConfig(preference_loss=loss), "lora": LoraConfig(lora_rank=lora)}
    return configured(folder, data, "preference", optimizer={"batch_size": 2}, **others)


def test_preferences_about_images_are_those_of_transformers(tmp_path, data):
    folder = write_vision_model(tmp_path / "model")
    config = judging(folder, data(*PAIRS), "simpo", None)
    dataset = load_dataset(config, tmp_path, print)
    ours = load_base(config, tmp_path, print).model
    task = dataset.task(config)
    loss = task.loss(ours, task.next_batch())
    loss.backward()
    peer = transformers.AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    means = {}
    for name in ("chosen", "rejected"):
        rows = [{"messages": [*pair["prompt"], *pair[name]], "images": pair["images"]} for pair in PAIRS]
        means[name] = torch.stack([-peer(**inputs_of_transformers(folder, row)).loss for row in rows])
    given = config.objective
    margins = given.beta * (means["chosen"] - means["rejected"]) - given.margin
    theirs = -torch.nn.functional.logsigmoid(margins).mean()
    theirs.backward()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    names = dict(peer.named_parameters())
    gradient = names[decoder_adapter("smolvlm").hf_name("connector.weight")].grad
    torch.testing.assert_close(ours.connector.weight.grad, gradient, rtol=1e-3, atol=1e-6)


def test_the_reference_sees_the_images_with_its_own_weights(tmp_path, data):
    folder = write_vision_model(tmp_path / "model")
    config = judging(folder, data(*PAIRS), "sigmoid", 4)
    task = load_dataset(config, tmp_path, print).task(config)
    model = load_base(config, tmp_path, print).model
    batch = task.next_batch()
    assert task.loss(model, batch).item() == pytest.approx(math.log(2), rel=1e-6)
    before = model.connector.weight.detach().clone()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.5 if "lora" in name.lower() else 0.1)
    assert torch.equal(model.connector.weight, before)  # images are not seen by adapters alone
    blind = (batch[0], torch.zeros_like(batch[1]), batch[-1])
    assert task.loss(model, batch).item() != pytest.approx(task.loss(model, blind).item(), rel=1e-6)


def test_answers_to_the_prompts_of_others_are_judged_beside_these_prompts_images(tmp_path, data):
    folder = write_vision_model(tmp_path / "model")
    rows = [
        {"prompt": pair["prompt"], "completion": pair["chosen"], "label": True, "images": pair["images"]}
        for pair in PAIRS
    ]
    config = judging(folder, data(*rows), "kto", 4)
    task = load_dataset(config, tmp_path, print).task(config)
    _, desirable, images, _ = task.next_batch()
    assert desirable.tolist() == [True] * 4
    (first, second), (third, fourth) = images[:2], images[2:]
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("lora", [None, 4])
def test_what_is_trained_is_saved_and_served_with_images_with_the_same_numbers(lora, tmp_path, data, record):
    folder = write_vision_model(tmp_path / "model")
    config = configured(folder, data(*TALKS), lora=LoraConfig(lora_rank=lora))
    dataset, base = load_dataset(config, tmp_path, print), load_base(config, tmp_path, print)
    seen = record()
    Trainer(base.model, dataset, config).run(seen, StopFlag())
    assert seen.losses[3] < seen.losses[1]
    assert not any("no gradient" in line for line in seen.lines)
    saved = base.save(tmp_path / "saved")
    if lora is None:
        settings = [json.loads((one / "preprocessor_config.json").read_text()) for one in (saved, folder)]
        assert settings[0] == settings[1]
    conversation = ChatMessage(role="user", content="what is in it", images=(WIDE,))
    sizes, found = EngineConfig(num_threads=1, kv_cache_memory_bytes=2**24), queue.SimpleQueue()
    host = EngineHost(folder if lora else saved, sizes, found.put)
    try:
        if lora:
            host.load_adapter("tuned", saved)
        params = SamplingParams(max_new_tokens=6, ignore_eos=True, top_logprobs=1)
        host.submit(TextTask(prompt=Prompt(chat=(conversation,)), params=params, adapter="tuned" if lora else ""))
        tokens = []
        while len(tokens) < 6:
            for one in found.get(timeout=60):
                assert one.error is None
                tokens += one.delta.tokens
    finally:
        host.stop(0)
    tiles = tiles_in(folder, dataset.tokenizer)
    row = {"messages": asked(IMAGE, "what is in it"), "images": ["wide.png"]}
    (chat,) = read_chats(rows_in([data(row)], reading := Reading(tiles=tiles)), dataset.tokenizer, reading)
    begin = next(place for place, target in enumerate(chat.targets) if target != IGNORED) + 1
    ids = torch.tensor([*chat.inputs[:begin], *(token.id for token in tokens)])
    model = base.model.eval()
    with torch.no_grad(), model.seeing(ids[None], chat.images.pixels(tiles.reader)[None]):
        logits = model(ids[None])[0, begin - 1 : -1].log_softmax(-1)
    wanted = logits.gather(1, ids[begin:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([token.logprob for token in tokens]), wanted, rtol=1e-4, atol=1e-5)


YES = NO_IMAGE["messages"][1]
NO = YES | {"content": "no"}
ONE = base64.b64encode(HIGH).decode()
URL = f"data:image/png;base64,{ONE}"
TURNS = [{"from": "human", "value": "<image>\nhi"}, {"from": "gpt", "value": "yes"}]
SHAPES = {
    "TRL": {"messages": asked(IMAGE, "hi", answer="yes"), "images": ["high.png"]},
    "TRL, texts": {"prompt": "hi", "completion": "yes", "images": ["high.png"]},
    "TRL, one image": {"prompt": [asked("hi")[0]], "completion": [YES], "image": "high.png"},
    "indices": {"messages": asked(IMAGE | {"index": 0, "text": None}, "hi", answer="yes"), "images": ["high.png"]},
    "the path in the part": {"messages": asked({"type": "image", "path": "high.png"}, "hi", answer="yes")},
    "Qwen": {"messages": asked({"type": "image", "image": "high.png"}, "hi", answer="yes")},
    "base64": {"messages": asked({"type": "image", "base64": ONE}, "hi", answer="yes")},
    "OpenAI": {"messages": asked({"type": "image_url", "image_url": {"url": URL}}, "hi", answer="yes")},
    "Responses": {"messages": asked({"type": "input_image", "image_url": URL}, "hi", answer="yes")},
    "LLaVA": {"id": "1", "image": "high.png", "conversations": TURNS},
    "LLaMA-Factory": {"messages": [{"role": "user", "content": "<image>hi"}, YES], "images": ["high.png"]},
    "The Cauldron": {"images": [{"path": "high.png"}], "texts": [{"user": "hi", "assistant": "yes", "source": "a"}]},
    "Ollama": {"messages": [{"role": "user", "content": "hi", "images": [URL]}, YES]},
    "questions": {"image": {"path": "high.png"}, "question": "hi", "answer": "yes"},
}  # fmt: skip


def assert_shows(chat, *contents):
    assert [one["content"] for one in chat.messages] == list(contents)
    (image,) = chat.images
    assert (image if isinstance(image, bytes) else image.read_bytes()) == HIGH


@pytest.mark.parametrize("shape", SHAPES)
def test_published_shapes_with_an_image_are_the_same(shape, data):
    reading = Reading()
    ((_, chat),) = checked_chats(rows_in([data(SHAPES[shape])], reading), reading)
    between = "\n" if shape == "LLaVA" else ""
    assert_shows(chat, f"{IMAGE_PLACE}{between}hi", "yes")
    assert not reading.aside & {"image", "images", "messages.images"}


PREFERRED = {
    "TRL": {"prompt": asked(IMAGE, "hi")[:1], "chosen": [YES], "rejected": [NO], "images": ["high.png"]},
    "conversations": {"chosen": asked(IMAGE, "hi", answer="yes"), "rejected": asked(IMAGE, "hi", answer="no"),
                      "images": ["high.png"]},
    "RLAIF-V": {"image": {"path": "high.png"}, "question": "hi", "chosen": "yes", "rejected": "no"},
    "LLaMA-Factory": {"conversations": TURNS[:1], "chosen": {"from": "gpt", "value": "yes"},
                      "rejected": {"from": "gpt", "value": "no"}, "images": ["high.png"]},
    "Ollama": {"prompt": [{"role": "user", "content": "hi", "images": [URL]}], "chosen": "yes", "rejected": "no"},
}  # fmt: skip


@pytest.mark.parametrize("shape", PREFERRED)
def test_published_preferences_with_an_image_show_it_to_both_answers(shape, data):
    reading = Reading()
    ((_, both),) = checked_preferences(rows_in([data(PREFERRED[shape])], reading), reading)
    between = "\n" if shape == "LLaMA-Factory" else ""
    for chat, answer in zip(both, ("yes", "no"), strict=True):
        assert_shows(chat, f"{IMAGE_PLACE}{between}hi", answer)
    assert not reading.aside & {"image", "images", "messages.images"}


def test_tables_of_datasets_hold_the_bytes_of_images(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"images": [{"bytes": HIGH, "path": "a.png"}], "messages": asked(IMAGE, "hi")}, NO_IMAGE | {"images": []}]
    parts = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in NO_IMAGE["messages"]
    ]
    rows[0]["messages"][1]["content"] = [{"type": "text", "text": "yes"}]
    parquet.write_table(pa.Table.from_pylist([rows[0], rows[1] | {"messages": parts}]), tmp_path / "a.parquet")
    reading = Reading()
    found = [chat for _, chat in checked_chats(rows_in([tmp_path / "a.parquet"], reading), reading)]
    assert [chat.images for chat in found] == [(HIGH,), ()]


def refused(data, row, folder=None, **others):
    reading = Reading(**({"tiles": tiles_in(folder, vision_tokenizer())} if folder else {}), **others)
    with pytest.raises(InvalidValue) as error:
        list(read_chats(rows_in([data(NO_IMAGE, row)], reading), vision_tokenizer(), reading))
    assert "a.jsonl, line 2" in error.value.message
    return error.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": ["none.png"]}, "none.png.*below"),
        ({"images": ["../secret.png"]}, "below"),
        ({"images": ["/etc/hostname"]}, "below"),
        ({"images": ["https://a.b/c.png"]}, "not fetched"),
        ({"images": ["high.png", "wide.png"]}, "2 images"),
        ({"images": []}, "0 images"),
        ({"images": ["broken.png"]}, "broken.png"),
        ({"images": [base64.b64encode(HIGH[:200]).decode()]}, "below"),
        ({"images": ["data:image/png;base64,###"]}, "base64"),
        ({"images": ["data:image/png;base64," + base64.b64encode(HIGH[:200]).decode()]}, "an image file"),
        ({"images": [3]}, "a path"),
        (
            {"messages": [asked(IMAGE)[0], {"role": "assistant", "content": [IMAGE]}], "images": ["high.png"] * 2},
            "role",
        ),
        ({"messages": asked({"type": "video"}, "hi"), "images": None}, "video"),
        ({"videos": ["a.mp4"]}, "videos"),
        ({"image": "high.png"}, "image and images"),
        ({"messages": asked(*[IMAGE] * 65), "images": ["high.png"] * 65}, "at most 64"),
    ],
)
def test_images_that_are_none_are_refused_with_their_line(changes, said, tmp_path, data):
    folder = write_vision_model(tmp_path / "model")
    (tmp_path / "secret.png").write_bytes(HIGH)
    (tmp_path / "data" / "broken.png").write_bytes(HIGH[: len(HIGH) // 2])
    row = {"messages": asked(IMAGE, "hi"), "images": ["high.png"]} | changes
    message = refused(data, row, folder)
    assert re.search(said, message), message
    reading = Reading(skip_broken=True, tiles=tiles_in(folder, vision_tokenizer()))
    kept = list(read_chats(rows_in([data(NO_IMAGE, row)], reading), vision_tokenizer(), reading))
    assert (len(kept), reading.dropped["left out, as they cannot be read"]) == (1, 1)


def test_models_and_tasks_that_see_no_images_refuse_them(tmp_path, data):
    row = TALKS[0]
    assert "smolvlm" in refused(data, row, tmp_path)
    assert "in conversations" in refused(data, row)
    folder = write_vision_model(tmp_path / "model")
    for others in ({"objective": ObjectiveConfig(teacher=str(folder))}, {"cp": 2, "workers": 2}):
        with pytest.raises(InvalidValue, match="line 1, with images"):
            load_dataset(configured(folder, data(row), **others), tmp_path, print)


def test_an_image_that_changes_is_noticed(tmp_path, data):
    folder = write_vision_model(tmp_path / "model")
    config = configured(folder, data(*TALKS))
    dataset = load_dataset(config, tmp_path, print)
    before = data_digest(config, tmp_path, dataset.files)
    (tmp_path / "data" / "wide.png").write_bytes(HIGH)
    assert data_digest(config, tmp_path, dataset.files) != before
    with pytest.raises(InvalidValue, match=r"wide\.png"):
        dataset.task(config).next_batch()


def test_a_preview_shows_images_as_tokens_or_by_name(tmp_path, data):
    folder, path = write_vision_model(tmp_path / "model"), data(*TALKS)
    tokenizer = vision_tokenizer()
    found = preview(str(path), ShowConfig(), tokenizer, tiles_in(folder, tokenizer))
    facts = found.facts(None)
    assert (facts["format"], facts["remarks"]["with images"]) == ("chat", 2)
    assert facts["columns"] == ["images", "messages"]
    assert "<image>" in shown(found.examples[0][0], tokenized=True)
    plain = preview(str(path), ShowConfig(), None)
    assert "<image high.png>what is in <image wide.png>" in shown(plain.examples[0][0], tokenized=False)
