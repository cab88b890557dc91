"""The messages between the gateways and the replicas of a model: MessagePack over gRPC, never pickled.

`Call` calls a method of the host and returns its result; `Outputs` streams the outputs of all tasks that one gateway
submitted to one replica, with the replica's load; `State` sends another replica the state of a prompt. All sides must
run the same release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
from attn_core.errors import AttnError, InternalError, error_of_reasons
from attn_engine import PromptState, RequestOutput
from attn_engine.client import EmbedTask, TextTask
from attn_gateway import ReplicaTls
from attn_schema import (
    AttentionMap,
    AttentionMapsRequest,
    Embeddings,
    EngineConfig,
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
"""Metadata key of the id of the gateway's session, to which its tasks belong."""

HEARTBEAT_SECONDS = 1.0
"""Interval at which a replica sends a message even if it has no outputs."""
MAX_MESSAGE_BYTES = 256 * 2**20
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

TLS_NAME = "replica.attn.internal"
"""The host name in the certificates of replicas, whatever address they listen at."""


def server_credentials(tls: ReplicaTls) -> grpc.ServerCredentials:
    """The TLS credentials of a replica, which accepts only clients with a certificate signed by the authority.

    Raises `InvalidValue` for files that cannot be read.
    """
    key, certificate, authority = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)


def open_channel(target: str, tls: ReplicaTls | None) -> grpc.aio.Channel:
    """Open a connection to a replica; raises `InvalidValue` for TLS files that cannot be read."""
    if tls is None:
        return grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
    key, certificate, authority = tls.read()
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    named = ("grpc.ssl_target_name_override", TLS_NAME)
    return grpc.aio.secure_channel(target, credentials, [*CHANNEL_OPTIONS, named])


@dataclass(frozen=True, kw_only=True)
class ReplicaAddress:
    """The address at which a replica listens, the secret it requires, its process id, and the model that it loaded.

    `changed` says that it has other weights by now, or sleeps.
    """

    id: str
    target: str
    secret: str
    pid: int
    info: ModelInfo
    changed: bool = False


class SentError(msgspec.Struct, frozen=True):
    """An error, with the reasons of its class and its base classes, the most specific first."""

    reasons: list[str]
    message: str
    metadata: dict[str, str]

    @classmethod
    def of(cls, error: AttnError) -> SentError:
        """Convert an error for sending."""
        above = [kind.reason for kind in type(error).__mro__ if issubclass(kind, AttnError)]
        return cls(above, error.message, error.metadata)

    def received(self) -> AttnError:
        """The error that was sent, as the most specific class that is known in this process."""
        return error_of_reasons(self.reasons, self.message, self.metadata)


class EngineTask(msgspec.Struct, frozen=True):
    """What a child process gets: the model that it serves, and environment variables that choose its GPU."""

    folder: str
    config: EngineConfig
    environment: Mapping[str, str] = {}


class Loaded(msgspec.Struct, frozen=True):
    """What a child process answers: its address, or the error of loading its model."""

    address: ReplicaAddress | None = None
    error: SentError | None = None


class SentTask(msgspec.Struct, frozen=True):
    """A `TextTask` with its parameters as a dict: msgspec cannot decode an integer as large as a seed into a Struct."""

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
        """Convert a task for sending."""
        given = msgspec.to_builtins(task.params)
        sampling, scoring = (given, None) if isinstance(task.params, SamplingParams) else (None, given)
        return cls(task.id, task.prompt, sampling, scoring, task.timeout, task.tenant, task.adapter, task.resume)

    def received(self) -> TextTask:
        """The task that was sent."""
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
    """The address (`target`) where the `size` bytes of a state can be fetched, once, by a caller with the `key`.

    `model` is the `fingerprint` of the model that computed the state; `state` is the state without its bytes.
    """

    target: str
    key: str
    size: int
    model: str
    state: PromptState


class SentOutputs(msgspec.Struct, frozen=True):
    """Outputs of tasks, in order, and the statistics of the replica."""

    ids: list[str]
    deltas: list[OutputDelta]
    errors: dict[int, SentError]
    """Errors by the index of their output."""
    stats: EngineStats
    gateways: int = 1
    """The number of gateways that are connected to the replica."""
    draining: bool = False
    """Whether the replica refuses new tasks and hands over its running ones."""

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput], stats: EngineStats, gateways: int, *, draining: bool) -> SentOutputs:
        """Convert outputs for sending."""
        errors = {place: SentError.of(output.error) for place, output in enumerate(outputs) if output.error is not None}
        return cls([o.request_id for o in outputs], [o.delta for o in outputs], errors, stats, gateways, draining)

    def received(self) -> list[RequestOutput]:
        """The outputs that were sent."""
        return [
            RequestOutput(name, delta, self.errors[place].received() if place in self.errors else None)
            for place, (name, delta) in enumerate(zip(self.ids, self.deltas, strict=True))
        ]


class SentCall(msgspec.Struct, frozen=True):
    """The name of a method of the host, and its arguments."""

    method: str
    arguments: msgspec.Raw


class SentAnswer(msgspec.Struct, frozen=True):
    """The result of a method, or the error that it raised."""

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
    "sleep": (tuple[float], None),
    "wake_up": (tuple[()], None),
    "stage_weights": (tuple[bytes, int], None),
    "open_staged": (tuple[()], None),
    "use_staged": (tuple[float], None),
    "drop_staged": (tuple[()], None),
}
"""The argument types and the result type of each method that a gateway may call."""

_encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder(enc_hook=str).encode
_ARGUMENTS = {
    name: msgspec.msgpack.Decoder(kinds[0], dec_hook=lambda kind, text: kind(text)) for name, kinds in METHODS.items()
}
_ANSWERS = {name: msgspec.msgpack.Decoder(kinds[1]) for name, kinds in METHODS.items()}
_CALL = msgspec.msgpack.Decoder(SentCall)
_ANSWER = msgspec.msgpack.Decoder(SentAnswer)
_OUTPUTS = msgspec.msgpack.Decoder(SentOutputs)


def encode_call(method: str, *arguments: Any) -> bytes:
    """Encode a call."""
    sent = [SentTask.of(argument) if isinstance(argument, TextTask) else argument for argument in arguments]
    return _encode(SentCall(method, msgspec.Raw(_encode(sent))))


def decode_call(data: bytes) -> tuple[str, tuple[Any, ...]]:
    """Decode the method and arguments of a call; raises `InternalError` for an invalid call."""
    try:
        call = _CALL.decode(data)
        arguments = _ARGUMENTS[call.method].decode(call.arguments)
    except (msgspec.MsgspecError, KeyError) as error:
        raise InternalError(f"a gateway sent an invalid call: {type(error).__name__}") from error
    return call.method, tuple(part.received() if isinstance(part, SentTask) else part for part in arguments)


def encode_answer(value: Any) -> bytes:
    """Encode the result of a method, or the `AttnError` that it raised."""
    if isinstance(value, AttnError):
        return _encode(SentAnswer(msgspec.Raw(_encode(None)), SentError.of(value)))
    return _encode(SentAnswer(msgspec.Raw(_encode(value))))


def decode_answer(method: str, data: bytes) -> Any:
    """Decode and return the result of a method; raises the error if it raised one."""
    answer = _ANSWER.decode(data)
    if answer.error is not None:
        raise answer.error.received()
    return _ANSWERS[method].decode(answer.value)


def encode_outputs(outputs: SentOutputs) -> bytes:
    """Encode outputs."""
    return _encode(outputs)


def decode_outputs(data: bytes) -> SentOutputs:
    """Decode the outputs that a replica sent."""
    return _OUTPUTS.decode(data)
