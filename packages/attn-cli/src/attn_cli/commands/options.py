"""Options that several commands share, and the choice between a server's model and one in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, Self

import typer
from attn_core import installed
from attn_core.errors import InvalidValue, MissingPackage
from attn_schema import ConnectionOptions, DeviceConfig, EngineConfig, PromptLike, SamplingParams, SequenceScore
from attn_schema.flags import flag_fields
from attn_schema.output import note
from attn_schema.text_client import TextClient

if TYPE_CHECKING:
    from attn_client import Client

ModelHere = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Model to run on this machine: a pulled one, a folder, or a GGUF file."),
]
Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Image file to send with the message, for a vision-language model; may be repeated."),
]


def read_images(paths: Sequence[Path]) -> list[bytes]:
    """Read image files as bytes; raises `InvalidValue` for one that cannot be read."""
    try:
        return [path.read_bytes() for path in paths]
    except OSError as error:
        raise InvalidValue.of("--image", str(error.filename), f"a file that can be read ({error.strerror})") from error


class LocalClient(TextClient, AbstractContextManager["LocalClient"], Protocol):
    """A client that runs models in this process."""

    def __enter__(self) -> Self:
        """Return the client itself; leaving the context stops its models."""
        ...

    def score(self, model: str, prompts: Sequence[PromptLike]) -> list[SequenceScore]:
        """The log probabilities of the tokens of each sequence."""
        ...

    def embed(self, model: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text."""
        ...

    def transcribe(
        self, model: str, files: Sequence[Path], *, language: str | None = None, task: str | None = None
    ) -> Iterator[str]:
        """The speech in WAV files as text, one after the other."""
        ...

    def fetch(self, model: str, *, revision: str | None = None, file: str | None = None) -> None:
        """Download a model that is not on this machine; with a revision or a file always."""
        ...

    def only_chat_model(self) -> str:
        """The name of the only model on this machine that has a chat template."""
        ...


def connect(options: ConnectionOptions) -> Client:
    """Make a client from these options; raises `InvalidValue` for a file that cannot be read."""
    from attn_client import Client, ClientSettings

    return Client(ClientSettings.of(options))


def here(engine: EngineConfig | None = None) -> LocalClient:
    """Make a client that runs models in this process, with the first plugin that provides one.

    Raises `MissingPackage` if no plugin does.
    """
    for _, open_client in installed().offers("attn_local_clients"):
        client: LocalClient = open_client(engine or EngineConfig())
        return client
    raise MissingPackage.of("attn-engine", "running a model without a server")


def writer_for(stack: ExitStack, *, local: bool, connection: ConnectionOptions, engine: EngineConfig) -> TextClient:
    """Make a client that runs models in this process with the given engine, or a client of a server.

    Raises `InvalidValue` for an option that only applies to the other kind.
    """
    refuse_options_of_the_other(local=local, connection=connection, engine=engine)
    return stack.enter_context(here(engine) if local else connect(connection))


def described(client: TextClient, model: str, sampling: SamplingParams, *, chat: bool = False) -> None:
    """Find a model, which is loaded if it runs here, and say which recommendations of it `sampling` leaves to it.

    Raises `UnknownName` for a model that there is not, and `InvalidValue` for one without a chat template if `chat`.
    """
    info = client.model_info(model)
    if chat and not info.chat:
        raise InvalidValue.of("model", model, "a model with a chat template; without one: attn generate")
    wished = info.recommended_sampling.items()
    followed = [f"{name} {value:g}" for name, value in wished if getattr(sampling, name) is None]
    if followed and sampling.num_beams == 1:
        note(f"attn: as {model} recommends: {', '.join(followed)}")


def refuse_options_of_the_other(*, local: bool, connection: ConnectionOptions, engine: DeviceConfig) -> None:
    """Raise `InvalidValue` for a connection option with a local model, or an engine option with a server's model."""
    if local:
        _refuse_connection_options(connection)
    else:
        _refuse_engine_options(engine)


def _refuse_connection_options(connection: ConnectionOptions) -> None:
    """Raise `InvalidValue` for connection options, except values that come from environment variables."""
    for info in flag_fields(ConnectionOptions):
        given = getattr(connection, info.name)
        if given != info.default and str(given) != os.environ.get(info.extra["envvar"]):
            allowed = "only with a server's model, which is named without --model"
            raise InvalidValue.of(f"--{info.name.replace('_', '-')}", given, allowed)


def _refuse_engine_options(engine: DeviceConfig) -> None:
    shared = {info.name for info in flag_fields(SamplingParams)}
    for info in flag_fields(type(engine)):
        given = getattr(engine, info.name)
        if given != info.default and info.name not in shared:
            flag = f"--{info.name.replace('_', '-')}"
            raise InvalidValue.of(flag, given, f"only with a model here; a server has its own: attn serve {flag}")
