"""Conversations: checks messages, and renders chat templates in a separate process."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from attn_core.errors import InvalidValue, Unavailable, UserError, cleaning_up, starting
from attn_schema import IMAGE_PLACE

from attn_models.tokenizers import template_child

Message = Mapping[str, Any]
"""A message: its role, its content, and further keys that its chat template may read, such as tool_calls."""


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dictionaries.

    Raises `InvalidValue` if there are none, and, naming the message, if one lacks a role, or a content that is a
    string; None may stand for it in a message with other keys, such as tool_calls.
    """
    if not messages:
        raise InvalidValue.of("messages", [], "at least one message")
    for place, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidValue.of(f"messages[{place}].role", role, "a role such as system, user or assistant")
        content = message.get("content")
        if not isinstance(content, str) and (content is not None or not message.keys() - {"role", "content"}):
            raise InvalidValue.of(f"messages[{place}].content", content, "a string")
    return [dict(message) for message in messages]


def texts_in(value: Any) -> Iterator[str]:
    """All texts within a JSON value, the keys of its objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inside in value.items():
            yield key
            yield from texts_in(inside)
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from texts_in(inside)


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text changed, and every key that is no name."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key if key.isidentifier() else change(key): with_texts(each, change) for key, each in value.items()}
    return [with_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def content_parts(content: str) -> list[dict[str, str]]:
    """The parts of a content for templates of vision-language models: text, and an image for each `IMAGE_PLACE`."""
    pieces = [piece for piece in re.split(f"({IMAGE_PLACE})", content) if piece]
    return [{"type": "image"} if piece == IMAGE_PLACE else {"type": "text", "text": piece} for piece in pieces]


def ended_after(text: str, content: str) -> str:
    """A rendered conversation up to the end of its last content; raises `UserError` if the template changes that."""
    place = text.rfind(content.strip())
    if not content.strip() or place < 0:
        raise UserError("continue_final_message needs a last message whose content the chat template writes unchanged")
    return text[: place + len(content.strip())] + content[len(content.rstrip()) :]


PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Characters of Unicode's private plane, which have no meaning and are not changed by filters of templates."""


Spelled = Callable[[str], list[str]]
"""A function that returns the control tokens in a text, each as it is spelled there."""


@dataclass(frozen=True)
class ControlTokenPlaceholders:
    """Values of a template in which each control token is replaced by a placeholder character c, which stands for
    `spelled[c]`."""

    values: Any
    spelled: Mapping[str, str]

    @classmethod
    def of(cls, values: Any, control: Spelled) -> ControlTokenPlaceholders:
        """Replace every control token that is spelled in a text within a JSON value by one character.

        Raises `InvalidValue` if the texts leave too few characters of the private plane unused.
        """
        texts = list(dict.fromkeys(texts_in(values)))
        found = sorted({token for text in texts for token in control(text)} - {""})
        stands_for = dict(zip(found, unused_characters(texts, len(found)), strict=True))
        pattern = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
        if found:
            values = with_texts(values, lambda text: pattern.sub(lambda match: stands_for[match[0]], text))
        return cls(values, {character: token for token, character in stands_for.items()})

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The rendered text, split at the placeholders: pairs of a piece with its original spelling, and whether it is
        a control token that was spelled in a message."""
        if not self.spelled:
            yield text, False
            return
        for piece in re.split(f"([{''.join(self.spelled)}])", text):
            if piece:
                yield self.spelled.get(piece, piece), piece in self.spelled


def unused_characters(texts: Sequence[str], count: int) -> list[str]:
    """Characters of the private plane that no text has; raises `InvalidValue` if too few are left."""
    used = set().union(*texts) if count else set()
    unused = list(islice((chr(code) for code in PRIVATE_USE if chr(code) not in used), count))
    if len(unused) < count:
        raise InvalidValue.of(
            "messages", "nearly all private-use characters of Unicode", "text that uses fewer of them"
        )
    return unused


PATIENCE = 60.0
"""Seconds that a template may wait for the machine; its own processor time is limited by the process."""


class TemplateWorker:
    """One `template_child` process, started when first needed and restarted after a template caused it to be killed.

    Calls are serialised; rendering usually takes well under a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render `template` with `values`.

        Raises `UserError` with the error of the template, or if it exceeded a second of processor time or its memory
        limit, and `Unavailable` if the process cannot be started or the machine did not run it for `PATIENCE` seconds.
        """
        request = json.dumps({"template": template, "values": dict(values)}) + "\n"
        with self._lock:
            line = self._exchange(request)
        reply = json.loads(line)
        if "error" in reply:
            raise UserError(f"the chat template failed: {reply['error']}")
        text: str = reply["text"]
        return text

    def close(self) -> None:
        """Kill the process; the next call of `render` starts another."""
        with self._lock:
            self._drop()

    def _exchange(self, request: str) -> str:
        child = self._running()
        if child.stdin is None or child.stdout is None:
            raise Unavailable("the process of chat templates has no pipes; try again")
        began = time.monotonic()
        waited = threading.Timer(PATIENCE, child.kill)
        waited.daemon = True
        waited.start()
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            # An interrupted call would leave its reply in the pipe, to be read as that of the next call.
            with cleaning_up("the process of chat templates"):
                self._drop()
            raise
        finally:
            waited.cancel()
        if not line.endswith("\n"):
            self._drop()
            if time.monotonic() - began >= PATIENCE:
                raise Unavailable(
                    f"no chat template could be rendered for {PATIENCE} s, as the machine is busy; try again"
                )
            raise UserError("the chat template exceeded its limit of one second of processor time or of memory")
        return line

    def _running(self) -> subprocess.Popen[str]:
        # After a fork, the child belongs to the parent process.
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            # Run as a script (-P: without its folder on the path), it starts in a tenth of a second.
            command = [sys.executable, "-P", template_child.__file__]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            with starting("chat templates"):
                self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, encoding="utf-8")
            self._owner = os.getpid()
        return self._child

    def _drop(self) -> None:
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.kill()
            child.communicate()


_WORKER = TemplateWorker()
atexit.register(_WORKER.close)


def render_template(template: str, values: Mapping[str, Any]) -> str:
    """Render a chat template with this process's `TemplateWorker`; raises the errors of `TemplateWorker.render`."""
    return _WORKER.render(template, values)
