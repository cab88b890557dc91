"""What lets a model write: a client of a server, or of this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from attn_client.results.inference import Chunk, Completion
from attn_client.sampling import ChatMessage, Prompt, Sampling


class Writer(Protocol):
    """Implement `generate`; everything else is said with it. Every call takes `timeout` in seconds."""

    def generate(
        self, model: str, prompt: Prompt, sampling: Sampling | None = None, *, timeout: float | None = None
    ) -> Generator[Chunk, None, None]:
        """The completion of a prompt, piece by piece; closing the iterator cancels it."""
        ...

    def complete(
        self, model: str, prompt: Prompt, sampling: Sampling | None = None, *, timeout: float | None = None
    ) -> Completion:
        """The whole completion of a prompt."""
        return Completion.of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def complete_all(
        self, model: str, prompt: Prompt, sampling: Sampling, *, timeout: float | None = None
    ) -> list[Completion]:
        """Every completion of a prompt, as many as `sampling.completions`."""
        return Completion.all_of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def chat(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        sampling: Sampling | None = None,
        *,
        timeout: float | None = None,
    ) -> Generator[Chunk, None, None]:
        """The next turn of a conversation, piece by piece, by the model's chat template."""
        return self.generate(model, messages, sampling, timeout=timeout)
