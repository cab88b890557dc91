"""Every noun and its message agree, and one is turned into the other without loss."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, get_args, get_origin

import attn_schema
import pytest
from attn.v1 import common_pb2, inference_pb2
from attn_core.errors import InvalidValue
from attn_schema import (
    AttentionMapsRequest,
    ChatMessage,
    EarlyStopping,
    EncoderPrompt,
    EngineConfig,
    FinishReason,
    GenerateRequest,
    Mechanism,
    MechanismOption,
    ModelInfo,
    ModelState,
    OutputDelta,
    Prompt,
    SamplingParams,
    Schema,
    StateKind,
    StructuredOutput,
    Token,
    TopLogprob,
    Usage,
)
from attn_schema.codec import (
    UNKNOWN,
    enum_prefix,
    from_message,
    message_class,
    parsed,
    removed_fields,
    to_message,
    wire_fields,
)
from attn_schema.methods import METHODS, LoadModelRequest
from attn_schema.schema import FieldInfo, element_of, is_enum, is_noun
from attn_schema.training import TRAINING_NOUNS, TrainingJob
from google.protobuf.descriptor import FieldDescriptor

WITHOUT_MESSAGE = {
    *("Checked", "ClusterConfig", "Completion", "ConnectionOptions", "DeviceConfig", "Schema", "ScoringParams"),
    *("ServedModelConfig", "ServerConfig"),
}
"""Nouns that never cross the wire."""
NOUNS = [
    noun
    for name in sorted(attn_schema.__all__)
    if isinstance(noun := getattr(attn_schema, name), type) and issubclass(noun, Schema) and name not in WITHOUT_MESSAGE
]
NOUNS += [noun for noun in TRAINING_NOUNS if noun not in NOUNS]

TYPES: dict[Any, tuple[int, ...]] = {
    bool: (FieldDescriptor.CPPTYPE_BOOL,),
    bytes: (FieldDescriptor.CPPTYPE_STRING,),
    str: (FieldDescriptor.CPPTYPE_STRING,),
    int: (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64),
    float: (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE),
}
JSON = ("google.protobuf.Struct", "google.protobuf.Value")


def differences(noun: type[Any]) -> list[str]:
    """How a noun and its message differ in fields, types and enumerations, in words."""
    fields = message_class(noun).DESCRIPTOR.fields_by_name
    infos = {info.name: info for info in wire_fields(noun)}
    found = [f"{name} is in the message only" for name in fields if name not in infos]
    found += [f"{name} is in the noun only" for name in infos if name not in fields]
    for name, info in infos.items():
        if name in fields:
            found += [f"{name}: {text}" for text in [shape_of(info, fields[name])] if text]
    return found


def shape_of(info: FieldInfo, field: Any) -> str:
    """What is wrong with how often a field is there, or else with its type; empty if nothing is."""
    if get_origin(info.kind) is dict:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        return "" if is_map or (field.message_type and field.message_type.full_name in JSON) else "a mapping"
    listed = get_origin(info.kind) is tuple
    kind = element_of(get_args(info.kind)[0]).kind if listed else info.kind
    if listed and not field.is_repeated and field.message_type and len(field.message_type.fields) == 1:
        (field,) = field.message_type.fields  # a list in a oneof
    if listed != field.is_repeated:
        return "a list in one of both only"
    zero = info.default in (0, 0.0, False, "", b"", ()) or info.required or is_enum(kind)
    if not zero and not (info.optional and kind is str) and not field.has_presence and not listed:
        return "needs `optional`: its default is not the zero of protobuf"
    return "" if same_type(kind, field) else f"{kind} and protobuf's type {field.type}"


def same_type(kind: Any, field: Any) -> bool:
    if is_enum(kind):
        prefix = enum_prefix(field.enum_type)
        theirs = {name.removeprefix(prefix) for name in field.enum_type.values_by_name} - {"UNSPECIFIED"}
        return theirs == set(kind.__members__) - {UNKNOWN}
    if field.message_type is not None:
        name = field.message_type.full_name
        ours = message_class(kind).DESCRIPTOR.full_name if is_noun(kind) else ""
        return name in ({ours} if ours else {"google.protobuf.Timestamp"} if kind is datetime else set(JSON))
    return field.cpp_type in TYPES[str if get_origin(kind) is Literal else kind]


@pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)
def test_a_noun_and_its_message_have_the_same_fields(noun: type[Schema]) -> None:
    assert differences(noun) == []


def test_a_difference_is_found() -> None:
    class Usage(Schema, frozen=True, kw_only=True):
        prompt_tokens: int = 1
        cached_tokens: str = ""
        finish: int = 0

    assert differences(Usage) == [
        "completion_tokens is in the message only",
        "queue_time is in the message only",
        "finish is in the noun only",
        "prompt_tokens: needs `optional`: its default is not the zero of protobuf",
        "cached_tokens: <class 'str'> and protobuf's type 5",
    ]


VALUES: list[Any] = [
    GenerateRequest(model="m", prompt=Prompt(text="")),
    GenerateRequest(
        model="m",
        prompt=Prompt(token_ids=(1, 2), encoder_prompt=EncoderPrompt(text="ein Hund")),
        sampling=SamplingParams(
            max_new_tokens=3, temperature=0.5, top_p=0.25, seed=2**64 - 1, stop=("a", "b"), ignore_eos=True,
            logit_bias={7: -1.5}, top_logprobs=0, n=4,
        ),
    ),
    SamplingParams(),
    SamplingParams(structured_output=StructuredOutput(regex="a+")),
    SamplingParams(num_beams=4, early_stopping=EarlyStopping.NEVER, length_penalty=0.0),
    Prompt(chat=(ChatMessage(role="user", content="hello"),)),
    EngineConfig(),
    EngineConfig(kv_offload_bytes=5, draft_model="small", num_speculative_tokens=0, quantization="int8"),
    AttentionMapsRequest(model="m", prompt=Prompt(text="a"), layers=(0, 2)),
    OutputDelta(tokens=(Token(id=3, text="a", logprob=0.0, top_logprobs=(TopLogprob(id=1, logprob=-1.0),)),)),
    OutputDelta(
        finish_reason=FinishReason.STOP, stop_reason="x", usage=Usage(prompt_tokens=1), index=2, score=-0.5
    ),
    ModelInfo(name="m", state=ModelState.SERVING, mechanisms=("a", "b"), load_time=datetime(2026, 1, 2, tzinfo=UTC)),
    Mechanism(
        name="gqa",
        state_kinds=(StateKind.PAGED,),
        options=(MechanismOption(name="a", type="int", default_value=3), MechanismOption(name="b", type="str")),
    ),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_noun_comes_back_from_its_message(value: Any) -> None:
    message = message_class(type(value)).FromString(to_message(value).SerializeToString())
    assert from_message(type(value), message) == value


def test_what_is_absent_has_the_default_and_takes_no_bytes() -> None:
    assert from_message(SamplingParams, inference_pb2.SamplingParams()) == SamplingParams()
    assert to_message(EngineConfig()).ByteSize() == 0


def test_values_newer_than_this_version_are_unknown_or_refused() -> None:
    model = message_class(ModelInfo)(name="m", state=99)
    assert from_message(ModelInfo, model).state is ModelState.UNKNOWN
    with pytest.raises(InvalidValue, match=r"early_stopping: 99 is not allowed"):
        from_message(SamplingParams, inference_pb2.SamplingParams(early_stopping=99))  # type: ignore[arg-type]


def test_numbers_are_checked_on_both_sides() -> None:
    with pytest.raises(InvalidValue, match=r"attempt: 2147483648 .*2\^31 - 1"):
        to_message(TrainingJob(attempt=2**31))
    with pytest.raises(InvalidValue, match="top_k: -1"):
        from_message(SamplingParams, inference_pb2.SamplingParams(top_k=-1))
    with pytest.raises(InvalidValue, match=r"token_ids\[1\]: -1"):
        from_message(Prompt, common_pb2.Prompt(token_ids=common_pb2.TokenIds(ids=[1, -1])))


@pytest.mark.parametrize(
    ("data", "field"), [(b"\x31" + b"\x00" * 8, "traffic"), (b"\x38\x01", "replace"), (b"\x98\x3f\x01", None)]
)
def test_a_field_that_was_removed_is_refused_by_name_and_a_later_one_is_let_through(data, field):
    given = to_message(LoadModelRequest(name="m")).SerializeToString() + data
    if field is None:
        assert from_message(LoadModelRequest, parsed(LoadModelRequest, given)) == LoadModelRequest(name="m")
        return
    with pytest.raises(InvalidValue, match="removed") as refused:
        parsed(LoadModelRequest, given)
    assert refused.value.metadata["field"] == field


def test_the_removed_fields_of_every_request_have_names():
    removed = {row.name: removed_fields(row.request) for row in METHODS}
    assert removed["LoadModel"] == {6: "traffic", 7: "replace"}
