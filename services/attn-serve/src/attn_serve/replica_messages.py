"""What gateways and replicas of a model send one another: MessagePack over gRPC, never pickled.

`Call` asks a method of the host and gets its answer; `Outputs` streams the outputs of all tasks that one gateway
submitted to one replica, with the replica's load; `State` gives another replica the state of a prompt. All sides are of
one release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
from attn_core.errors import AttnError, InternalError, error_of_reasons
from attn_engine import PromptState, RequestOutput
from attn_gateway import ReplicaTls
from attn_host import EmbedTask, TextTask
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineStats,
    ModelInfo,
    OutputDelta,
    Prompt,
    Resumption,
    SamplingParams,
    ScoringParams,
    Tokenization,
)

SERVICE = "attn.internal.Engine"
CALL = f"/{SERVICE}/Call"
OUTPUTS = f"/{SERVICE}/Outputs"
STATE = f"/{SERVICE}/State"
SECRET = "x-attn-secret"  # noqa: S105 - the name of the key
"""Metadata key of the replica's secret."""
SESSION = "x-attn-session"
"""Metadata key of the gateway's own id, under which its tasks are known."""

HEARTBEAT_SECONDS = 1.0
"""How often a replica that has nothing to say says so."""
MAX_MESSAGE_BYTES = 256 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

TLS_NAME = "replica.attn.internal"
"""The name in the certificates of replicas, wherever they listen."""


def server_credentials(tls: ReplicaTls) -> grpc.ServerCredentials:
    """Of a replica that talks only to those whom the authority has signed; raises `InvalidValue` for missing files."""
    key, certificate, authority = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def open_channel(target: str, tls: ReplicaTls | None) -> grpc.aio.Channel:
    """A connection to a replica; raises `InvalidValue` for files that cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
    key, certificate, authority = tls.read()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    named = ("grpc.ssl_target_name_override", TLS_NAME)
    return grpc.aio.secure_channel(target, credentials, [*CHANNEL_OPTIONS, named])


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """Where a replica listens, the secret it asks for, its process, and the model that it loaded."""

    id: str
    target: str
    secret: str
    pid: int
    info: ModelInfo


class SentError(msgspec.Struct, frozen=True):
    """An error, with the reasons of its class and those above it, the nearest first."""

    reasons: list[str]
    message: str
    metadata: dict[str, str]

    @classmethod
    def of(cls, error: AttnError) -> SentError:
        """The error as it is sent."""
        above = [kind.reason for kind in type(error).__mro__ if issubclass(kind, AttnError)]
        return cls(above, error.message, error.metadata)

    def received(self) -> AttnError:
        """The error as it was raised; of the nearest class that is known here."""
        return error_of_reasons(self.reasons, self.message, self.metadata)


class SentTask(msgspec.Struct, frozen=True):
    """A `TextTask`, its parameters as a dict: msgspec decodes no integer as large as a seed into a Struct."""

    id: str
    prompt: Prompt
    sampling: dict[str, Any] | None
    scoring: dict[str, Any] | None
    timeout: float | None
    tenant: str
    adapter: str
    resume: Resumption | None

    @classmethod
    def of(cls, task: TextTask) -> SentTask:
        """The task as it is sent."""
        given = msgspec.to_builtins(task.params)
        sampling, scoring = (given, None) if isinstance(task.params, SamplingParams) else (None, given)
        return cls(task.id, task.prompt, sampling, scoring, task.timeout, task.tenant, task.adapter, task.resume)

    def received(self) -> TextTask:
        """The task as it was asked."""
        params: SamplingParams | ScoringParams = SamplingParams()
        if self.scoring is not None:
            params = ScoringParams.from_mapping(self.scoring)
        elif self.sampling is not None:
            params = SamplingParams.from_mapping(self.sampling)
        return TextTask(
            id=self.id,
            prompt=self.prompt,
            params=params,
            timeout=self.timeout,
            tenant=self.tenant,
            adapter=self.adapter,
            resume=self.resume,
        )


class StateTicket(msgspec.Struct, frozen=True, kw_only=True):
    """Where the `size` bytes of a state can be fetched, once, by whoever knows the `key`.

    `model` is the `fingerprint` of the model that computed it; `state` is all of the state but its bytes.
    """

    target: str
    key: str
    size: int
    model: str
    state: PromptState


class SentOutputs(msgspec.Struct, frozen=True):
    """Outputs of some tasks, in their order, and how busy the replica is."""

    ids: list[str]
    deltas: list[OutputDelta]
    errors: dict[int, SentError]
    """By place."""
    stats: EngineStats
    gateways: int = 1
    """Gateways that are connected to the replica."""
    draining: bool = False
    """It takes no more tasks, and hands over those that it has."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], stats: EngineStats, gateways: int, *, draining: bool) -> SentOutputs:
        """The outputs as they are sent."""
        errors = {place: SentError.of(output.error) for place, output in enumerate(outputs) if output.error is not None}
        return cls([o.request_id for o in outputs], [o.delta for o in outputs], errors, stats, gateways, draining)

    def received(self) -> list[RequestOutput]:
        """The outputs as the engine made them."""
        return [
            RequestOutput(name, delta, self.errors[place].received() if place in self.errors else None)
            for place, (name, delta) in enumerate(zip(self.ids, self.deltas, strict=True))
        ]


class SentCall(msgspec.Struct, frozen=True):
    """A method of the host, and its arguments."""

    method: str
    arguments: msgspec.Raw


class SentAnswer(msgspec.Struct, frozen=True):
    """What a method returned, or the error that it raised."""

    value: msgspec.Raw
    error: SentError | None = None


METHODS: dict[str, tuple[Any, Any]] = {
    "submit": (tuple[SentTask], None),
    "submit_moved": (tuple[SentTask, StateTicket], None),
    "prefill": (tuple[SentTask], StateTicket),
    "cancel": (tuple[str], None),
    "embed": (tuple[EmbedTask], Embeddings),
    "tokenize": (tuple[Prompt], Tokenization),
    "attention_maps": (tuple[AttentionMapsRequest, str], list[AttentionMap]),
    "stats": (tuple[()], EngineStats),
    "load_adapter": (tuple[str, Path], None),
    "unload_adapter": (tuple[str], None),
}
"""The arguments and the answer of each method that a gateway may call."""

_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=str).encode
_ARGUMENTS = {
    name: msgspec.msgpack.Decoder(kinds[0], dec_hook=lambda kind, text: kind(text)) for name, kinds in METHODS.items()
}
_ANSWERS = {name: msgspec.msgpack.Decoder(kinds[1]) for name, kinds in METHODS.items()}
_CALL = msgspec.msgpack.Decoder(SentCall)
_ANSWER = msgspec.msgpack.Decoder(SentAnswer)
_OUTPUTS = msgspec.msgpack.Decoder(SentOutputs)


def encode_call(method: str, *arguments: Any) -> bytes:
    """A call as bytes."""
    sent = [SentTask.of(argument) if isinstance(argument, TextTask) else argument for argument in arguments]
    return _encode(SentCall(method, msgspec.Raw(_encode(sent))))


def decode_call(data: bytes) -> tuple[str, tuple[Any, ...]]:
    """The method and arguments of a call; raises `InternalError` for what no gateway of this release sends."""
    try:
        call = _CALL.decode(data)
        arguments = _ARGUMENTS[call.method].decode(call.arguments)
    except (msgspec.MsgspecError, KeyError) as error:
        raise InternalError(f"a gateway sent what is no call: {type(error).__name__}") from error
    return call.method, tuple(part.received() if isinstance(part, SentTask) else part for part in arguments)


def encode_answer(value: Any) -> bytes:
    """What a method returned, or the `AttnError` that it raised, as bytes."""
    if isinstance(value, AttnError):
        return _encode(SentAnswer(msgspec.Raw(_encode(None)), SentError.of(value)))
    return _encode(SentAnswer(msgspec.Raw(_encode(value))))


def decode_answer(method: str, data: bytes) -> Any:
    """What a method returned; raises the error that it raised."""
    answer = _ANSWER.decode(data)
    if answer.error is not None:
        raise answer.error.received()
    return _ANSWERS[method].decode(answer.value)


def encode_outputs(outputs: SentOutputs) -> bytes:
    """Outputs as bytes."""
    return _encode(outputs)


def decode_outputs(data: bytes) -> SentOutputs:
    """Outputs that a replica sent."""
    return _OUTPUTS.decode(data)
