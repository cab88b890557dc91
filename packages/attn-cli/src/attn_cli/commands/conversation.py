"""A conversation with a model: its turns so far, and the next answer."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing

import typer
from attn_core.errors import ContextLengthExceeded
from attn_schema import ChatMessage, SamplingParams
from attn_schema.output import note
from attn_schema.text_client import TextClient


class Conversation:
    """A conversation with one model. When the context is full, the oldest turns are dropped from the model's prompt.

    `before` are the messages of an earlier conversation to continue, beginning with its system message if it has one.
    `keep` is called with all messages after every answer.
    """

    def __init__(
        self,
        writer: TextClient,
        model: str,
        sampling: SamplingParams,
        before: Sequence[ChatMessage] = (),
        keep: Callable[[list[ChatMessage]], None] | None = None,
    ) -> None:
        self._writer = writer
        self._model = model
        self._sampling = sampling
        self._system = [message for message in before if message.role == "system"]
        self._turns = [message for message in before if message.role != "system"]
        self._all = list(self._turns)
        self._keep = keep

    @property
    def messages(self) -> list[ChatMessage]:
        """The messages of the model's next prompt."""
        return [*self._system, *self._turns]

    def forget(self) -> None:
        """Start over; the system message is kept."""
        self._turns.clear()
        self._all.clear()

    def answer(self, text: str, write: Callable[[str], None], images: Sequence[bytes] = ()) -> None:
        """Generate the answer to the message `text`, and pass it to `write` piece by piece.

        `images`, the bytes of image files, are attached to the message. Ctrl-C stops the answer, and the part generated
        by then stays in the conversation. After any other error, the message is removed from it.
        """
        self._turns.append(ChatMessage(role="user", content=text.rstrip("\n"), images=tuple(images)))
        said: list[str] = []
        try:
            with closing(self._pieces()) as pieces:
                for piece in pieces:
                    said.append(piece)
                    write(piece)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", err=True, nl=False)
        except BaseException:
            self._turns.pop()
            raise
        self._turns.append(ChatMessage(role="assistant", content="".join(said)))
        self._all += self._turns[-2:]
        if self._keep is not None:
            self._keep([*self._system, *self._all])

    def _pieces(self) -> Generator[str, None, None]:
        while True:
            chunks = self._writer.generate(self._model, self.messages, self._sampling)
            try:
                with closing(chunks):
                    for chunk in chunks:
                        yield chunk.text
                return
            except ContextLengthExceeded:
                if len(self._turns) < 3:
                    raise
                del self._turns[:2]
                note("[the oldest turn is forgotten: the context is full]")
