"""The interface of clients that generate text, with a server or in this process."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from attn_schema import (
    AttentionMap,
    ChatMessage,
    Completion,
    ModelInfo,
    OutputDelta,
    PromptLike,
    SamplingParams,
    Tokenization,
)


class TextClient(Protocol):
    """A text generator. Subclasses implement all but the last three methods. `timeout` is in seconds."""

    def generate(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Generator[OutputDelta, None, None]:
        """Stream the completion of a prompt as deltas; closing the iterator cancels the request."""
        ...

    def tokenize(self, model: str, prompt: PromptLike, *, timeout: float | None = None) -> Tokenization:
        """Tokenise a prompt as the model would read it."""
        ...

    def model_info(self, model: str, *, timeout: float | None = None) -> ModelInfo:
        """The description of a model; raises `UnknownName` for one that there is not."""
        ...

    def attention_maps(
        self,
        model: str,
        prompt: PromptLike,
        *,
        layers: Sequence[int] = (),
        heads: Sequence[int] = (),
        gradients: bool = False,
    ) -> list[AttentionMap]:
        """The attention weights of a prompt, one map for each layer; with `gradients`, the first map has gradients."""
        ...

    def complete(
        self, model: str, prompt: PromptLike, sampling: SamplingParams | None = None, *, timeout: float | None = None
    ) -> Completion:
        """The whole completion of a prompt."""
        return Completion.of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def complete_all(
        self, model: str, prompt: PromptLike, sampling: SamplingParams, *, timeout: float | None = None
    ) -> list[Completion]:
        """All `sampling.n` completions of a prompt."""
        return Completion.all_of(list(self.generate(model, prompt, sampling, timeout=timeout)))

    def chat(
        self,
        model: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
    ) -> Generator[OutputDelta, None, None]:
        """Stream the model's reply to a conversation as deltas, using the model's chat template."""
        return self.generate(model, messages, sampling, timeout=timeout)
