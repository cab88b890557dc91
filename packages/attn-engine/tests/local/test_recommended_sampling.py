"""What a request leaves out is as the model's generation_config.json recommends, read as transformers reads it."""

from __future__ import annotations

import json
import shutil

import pytest
from attn_cli.commands.options import described
from attn_core.errors import CheckpointInvalid, InvalidValue
from attn_engine import LocalClient
from attn_schema import SamplingParams
from attn_schema.sampling import RECOMMENDED

transformers = pytest.importorskip("transformers")

ADVICE = {"do_sample": True, "temperature": 1.7, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2}
PROMPT = "to be or "


@pytest.fixture
def advised(home, tmp_path):
    """Makes a copy of "writer" with a generation_config.json."""

    def copy(config):
        folder = shutil.copytree(home / "models" / "writer", tmp_path / "advised")
        (folder / "manifest.json").unlink()  # it would not list the file
        (folder / "generation_config.json").write_text(json.dumps(config))
        return str(folder)

    return copy


@pytest.mark.parametrize(
    "config",
    [
        {},
        ADVICE,
        {**ADVICE, "do_sample": False},
        {name: value for name, value in ADVICE.items() if name != "do_sample"},
        {"do_sample": True},
        {"do_sample": True, "typical_p": 0.5, "min_p": 0.1},
        {"repetition_penalty": 1.3, "temperature": None},
    ],
)
def test_a_recommendation_is_what_transformers_would_generate_with(config):
    said = transformers.GenerationConfig.from_dict(config)
    chosen = SamplingParams().resolved(SamplingParams.recommended(config))
    assert (chosen.temperature > 0) == (said.get_generation_mode() == "sample")
    assert chosen.repetition_penalty == (said.repetition_penalty or 1.0)
    if chosen.temperature > 0:
        written = {name: value for name, value in config.items() if name in RECOMMENDED}
        assert written.items() <= {name: getattr(chosen, name) for name in RECOMMENDED}.items()
        assert chosen.temperature == (said.temperature or 1.0)


def test_what_is_left_out_is_as_recommended_and_what_is_given_is_not(client, advised, capsys):
    model = advised(ADVICE)

    def tokens(name=model, **given):
        return client.complete(name, PROMPT, SamplingParams(max_new_tokens=16, **given)).tokens

    advice = {name: value for name, value in ADVICE.items() if name != "do_sample"}
    assert tokens(seed=3) == tokens("writer", seed=3, **advice)
    assert tokens(seed=3, temperature=0.5, top_k=0) == tokens(
        "writer", seed=3, **advice | {"temperature": 0.5, "top_k": 0}
    )
    assert tokens(temperature=0.0, repetition_penalty=1.0) == tokens("writer")
    assert tokens(num_beams=2) == tokens("writer", num_beams=2, repetition_penalty=1.2)
    assert client.model_info("writer").recommended_sampling == {}
    assert client.model_info(model).recommended_sampling == advice
    described(client, model, SamplingParams(temperature=0.5, top_p=1.0))
    said = capsys.readouterr().err
    assert "top_k 9, repetition_penalty 1.2" in said
    assert "temperature" not in said


def test_several_completions_differ_where_nothing_says_that_they_are_greedy(client):
    for given in ({}, {"typical_p": 0.9}, {"top_p": 0.9}):
        found = client.complete_all("writer", PROMPT, SamplingParams(max_new_tokens=24, n=4, seed=1, **given))
        assert len({completion.text for completion in found}) == 4
    greedy = client.complete("writer", PROMPT, SamplingParams(max_new_tokens=24, temperature=0)).text
    assert client.complete("writer", PROMPT, SamplingParams(max_new_tokens=24)).text == greedy


def test_a_recommendation_that_cannot_be_followed_is_refused_by_its_name(advised):
    with LocalClient() as opened, pytest.raises(CheckpointInvalid, match=r"generation_config\.json.*top_p.*7"):
        opened.model_info(advised({"do_sample": True, "top_p": 7}))


def test_who_wants_to_chat_hears_before_the_first_message_that_a_model_cannot(client):
    described(client, "talker", SamplingParams(), chat=True)
    with pytest.raises(InvalidValue, match="chat template"):
        described(client, "writer", SamplingParams(), chat=True)
