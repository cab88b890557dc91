"""Where a model answers: on a server, or in this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, Self

from attn_core import installed
from attn_core.errors import MissingPackage

from attn_client.writer import Writer


class LocalWriter(Writer, AbstractContextManager["LocalWriter"], Protocol):
    """What runs models in this process."""

    def __enter__(self) -> Self:
        """Itself; leaving stops its models."""
        ...

    def keep(self, weights: str) -> None:
        """Keep the weights of models so that are asked from now on."""
        ...

    def guess(self, branches: int) -> None:
        """Let guesses for models that are asked from now on go on in so many ways."""
        ...

    def draft(self, model: str, draft: str) -> None:
        """Let a smaller model guess for one that does not run yet."""
        ...

    def embed(self, model: str, texts: Sequence[str]) -> list[tuple[float, ...]]:
        """A vector of length 1 for each text."""
        ...

    def only_chat_model(self) -> str:
        """The one model of this machine that can chat."""
        ...


def here() -> LocalWriter:
    """The client of this process, from the first plugin that offers one; raises `MissingPackage` without one."""
    for _, open_client in installed().offers("attn_local_clients"):
        client: LocalWriter = open_client()
        return client
    raise MissingPackage.of("attn-local", "running a model without a server")
