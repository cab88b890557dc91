"""A noun holds only values that are allowed, and its errors name the field, the value and what is allowed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from attn_core.errors import InvalidValue, UnknownName
from attn_schema import (
    ChatMessage,
    EarlyStopping,
    EngineConfig,
    Prompt,
    SamplingParams,
    StructuredOutput,
    Tensor,
    fields_of,
)

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("max_new_tokens", {"max_new_tokens": True}),
    ("max_new_tokens", {"max_new_tokens": 1.5}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": float("inf")}),
    ("temperature", {"temperature": "hot"}),
    ("top_k", {"top_k": -1}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.1}),
    ("typical_p", {"typical_p": 0}),
    ("min_p", {"min_p": 2}),
    ("seed", {"seed": 2**64}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("frequency_penalty", {"frequency_penalty": 2.1}),
    ("presence_penalty", {"presence_penalty": -2.1}),
    ("logit_bias[3]", {"logit_bias": {3: 101.0}}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 0.0)}),
    ("min_new_tokens", {"max_new_tokens": 2, "min_new_tokens": 3}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop[0]", {"stop": [3]}),
    ("ignore_eos", {"ignore_eos": 1}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("n", {"n": 65}),
    ("num_beams", {"num_beams": 65}),
    ("num_beams", {"num_beams": 0}),
    ("length_penalty", {"num_beams": 2, "length_penalty": 11}),
    ("early_stopping", {"num_beams": 2, "early_stopping": "sometimes"}),
    ("n", {"num_beams": 2, "n": 3}),
    ("temperature", {"num_beams": 2, "temperature": 0.5}),
    ("seed", {"num_beams": 2, "seed": 1}),
    ("num_speculative_tokens", {"num_speculative_tokens": 33}),
    ("ignore_eos", {"structured_output": StructuredOutput(regex="a"), "ignore_eos": True}),
    ("min_new_tokens", {"structured_output": StructuredOutput(regex="a"), "min_new_tokens": 1}),
]


@pytest.mark.parametrize(("field", "given"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_allowed_is_refused_by_name(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as error:
        SamplingParams(**given)
    assert error.value.metadata["field"] == field
    assert "allowed" in error.value.message


def test_a_wrong_keyword_is_refused_with_those_that_are_near_it() -> None:
    with pytest.raises(UnknownName, match="field of SamplingParams 'temprature'; did you mean 'temperature'"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownName, match="field of EngineConfig 'devise'"):
        EngineConfig(devise="cpu")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="role"):
        ChatMessage(content="what is left out is no wrong word")  # type: ignore[call-arg]


def test_plain_values_become_those_of_the_fields() -> None:
    params = SamplingParams(temperature=1, stop="end", early_stopping=True, logit_bias={3: 1})
    assert type(params.temperature) is float
    assert params.stop == ("end",)
    assert params.early_stopping is EarlyStopping.TRUE
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_structured_output_is_exactly_one() -> None:
    assert StructuredOutput(regex="a+").kind == "regex"
    for given in ({}, {"regex": "a", "lark": "b"}, {"regex": ""}, {"regex": "a" * (2**18 + 1)}):
        with pytest.raises(InvalidValue):
            StructuredOutput(**given)


def test_a_prompt_is_text_token_ids_or_a_conversation() -> None:
    assert Prompt.of("a").text == "a"
    assert Prompt.of([1, 2]).token_ids == (1, 2)
    message = ChatMessage(role="user", content="hello")
    assert Prompt.of([message]).chat == (message,)
    encoder = Prompt.of("", encoder_prompt="ein Hund").encoder_prompt
    assert encoder is not None
    assert encoder.text == "ein Hund"
    for wrong in ([1, "a"], [2**31], [-1], 3, [message, 1]):
        with pytest.raises(InvalidValue, match="prompt"):
            Prompt.of(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="exactly one"):
        Prompt()


def test_a_mapping_becomes_a_noun_and_unknown_keys_are_refused() -> None:
    params = SamplingParams.from_mapping({"top_k": 3, "structured_output": {"regex": "a"}})
    assert params == SamplingParams(top_k=3, structured_output=StructuredOutput(regex="a"))
    with pytest.raises(UnknownName, match="did you mean 'temperature'"):
        SamplingParams.from_mapping({"temprature": 1})


def test_nouns_cross_processes() -> None:
    params = SamplingParams(stop=("a",), logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == params


def test_tensors_are_read_without_a_copy() -> None:
    tensor = Tensor(shape=(1, 2), data=b"\0\0\x80?\0\0\0@")
    assert tensor.view().tolist() == [[1.0, 2.0]]


def test_every_field_says_what_it_means() -> None:
    import attn_schema

    for name in attn_schema.__all__:
        noun = getattr(attn_schema, name)
        if isinstance(noun, type) and hasattr(noun, "__struct_fields__"):
            for info in fields_of(noun):
                assert info.description.endswith("."), f"{name}.{info.name}"


def test_nouns_need_neither_protobuf_nor_torch() -> None:
    heavy = ("google.protobuf", "grpc", "torch", "rich", "typer")
    code = f"import sys, attn_schema; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
