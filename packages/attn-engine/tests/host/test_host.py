"""A host answers from one loaded model, gives the same for the same request, and refuses what its model cannot do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attn_core import InvalidValue, installed
from attn_core.errors import UserError
from attn_engine.client import TextTask
from attn_engine.host.host import ModelHost
from attn_engine.in_process import open_host
from attn_models.loading import save_model
from attn_models.tokenizers import character_tokenizer
from attn_schema import EngineConfig, Prompt, SamplingParams, ScoringParams

# With importlib mode a test file cannot import its neighbour.
sys.path.insert(0, str(Path(__file__).parent))
from delivered import Outputs

ALPHABET = "abcdefghijklmnopqrstuvwxyz ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    tokenizer = character_tokenizer(ALPHABET)
    family = installed().models.get("decoder")
    sizes = {"vocab_size": len(ALPHABET), "max_seq_len": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    model = family.build(family.configure(sizes))
    place = tmp_path_factory.mktemp("model")
    save_model(place, model, tokenizer)
    return place


@pytest.fixture
def outputs() -> Outputs:
    return Outputs()


@pytest.fixture
def host(folder: Path, outputs: Outputs) -> Iterator[ModelHost]:
    opened = open_host(folder, EngineConfig(kv_cache_memory_bytes=2**22), outputs.put)
    yield opened
    opened.stop(timeout=10.0)


def test_a_host_completes_a_prompt_and_twice_the_same(host: ModelHost, outputs: Outputs) -> None:
    texts = []
    for _ in range(2):
        task = TextTask(prompt=Prompt(text="once upon"), params=SamplingParams(max_new_tokens=8, temperature=0))
        host.submit(task)
        texts.append([token.id for output in outputs.of(task) for token in output.delta.tokens])
    assert texts[0] == texts[1]
    assert len(texts[0]) == 8


def test_it_scores_every_token_of_a_prompt(host: ModelHost, outputs: Outputs) -> None:
    task = TextTask(prompt=Prompt(text="once"), params=ScoringParams())
    host.submit(task)
    scores = [token.logprob for output in outputs.of(task) for token in output.delta.tokens]
    assert len(scores) == len("once")
    assert all(score is None or score <= 0 for score in scores)


def test_it_tokenizes_as_its_model_was_saved_with(host: ModelHost) -> None:
    assert host.tokenize(Prompt(text="ab")).text == "ab"


def test_it_refuses_a_prompt_longer_than_its_model_reads(host: ModelHost) -> None:
    with pytest.raises(Exception, match="64"):
        host.submit(TextTask(prompt=Prompt(text="a" * 65), params=SamplingParams(max_new_tokens=1)))


def test_a_config_that_no_engine_can_keep_is_refused(folder: Path, outputs: Outputs) -> None:
    with pytest.raises(InvalidValue, match="kv_cache_memory_bytes"):
        open_host(folder, EngineConfig(kv_cache_memory_bytes=1), outputs.put)


@pytest.mark.parametrize(
    "other", [{"quantization": "int8"}, {"kv_cache": "int8"}, {"dtype": "float64"}, {"kernel": "torch_sdpa"}]
)
def test_what_is_not_batch_invariant_is_refused_by_name(folder: Path, outputs: Outputs, other: dict[str, str]) -> None:
    name = next(iter(other))
    with pytest.raises(UserError, match=name if name != "dtype" else "float64"):
        open_host(folder, EngineConfig(batch_invariant=True, **other), outputs.put)
