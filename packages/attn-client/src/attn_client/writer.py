"""What generates text: a client of a server, or of this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from attn_schema import ChatMessage, Completion, OutputDelta, PromptLike, SamplingParams, Tokenization


class Writer(Protocol):
    """Implement `generate` and `tokenize`; the rest follows. Every call takes `timeout` in seconds."""

    def generate(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Generator[OutputDelta, None, None]:
        """The completion of a prompt, delta by delta; closing the iterator cancels it."""
        ...

    def tokenize(self, model: str, prompt: PromptLike, *, timeout: float | None = None) -> Tokenization:
        """The tokens that the model would read."""
        ...

    def complete(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Completion:
        """The whole completion of a prompt."""
        return Completion.of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def complete_all(
        self, model: str, prompt: PromptLike, sampling: SamplingParams, *, timeout: float | None = None
    ) -> list[Completion]:
        """Every completion of a prompt, as many as `sampling.n`."""
        return Completion.all_of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def chat(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Generator[OutputDelta, None, None]:
        """The next message of a conversation, delta by delta, by the model's chat template."""
        return self.generate(model, messages, sampling, timeout=timeout)
