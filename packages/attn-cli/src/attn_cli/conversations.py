"""Saved conversations of `attn chat`: one JSON file each in $ATTN_HOME/conversations, readable only by its owner."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from attn_core.errors import InvalidValue, StateInvalid, UnknownName
from attn_schema import ChatMessage
from attn_schema.home import home_folder

ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
LAST = "last"
"""The name that selects the most recently used conversation."""
FILE_LIMIT = 64 << 20
FORMAT = 1


class KeptTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A saved message, with the bytes of its image files."""

    role: str
    content: str
    images: tuple[bytes, ...] = ()


class KeptConversation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a conversation file: all turns, including those that no longer fit into the model's context.

    `served` is whether the model runs on a server; `started` is the time of the first save, in UTC.
    """

    format: int
    model: str
    served: bool
    started: str
    messages: list[KeptTurn]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedConversation:
    """A conversation in a list: its id, model, number of answers, and the beginning of its first user message."""

    id: str
    model: str
    answers: int
    begins: str


class ConversationStore:
    """Reads and writes the saved conversations in the folder `conversations` of `home`."""

    def __init__(self, home: Path | None = None) -> None:
        self.folder = (home_folder() if home is None else home) / "conversations"

    def new_id(self) -> str:
        """Make an id for a conversation that begins now; sorting ids orders conversations by time."""
        return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"

    def ids(self) -> list[str]:
        """The ids of all conversations, oldest first."""
        return sorted(path.stem for path in self.folder.glob("*.json") if ID.fullmatch(path.stem))

    def find(self, name: str) -> str:
        """The id given, or for "last" the id of the most recently used conversation.

        Raises `UnknownName` if there is no such conversation, `InvalidValue` for a malformed id.
        """
        known = self.ids()
        if name == LAST:
            if not known:
                raise UnknownName(f"no conversation is kept in {self.folder}", kind="conversation", name=name)
            return max(known, key=lambda one: (self._path(one).stat().st_mtime_ns, one))
        if not ID.fullmatch(name):
            raise InvalidValue.of("--resume", name, f"{LAST!r}, or an id that `attn chat --list` shows")
        if name not in known:
            raise UnknownName.of("conversation", name, known)
        return name

    def read(self, name: str) -> KeptConversation:
        """Read the conversation with this id; raises `StateInvalid` if its file is not a valid conversation."""
        path = self._path(name)
        if path.is_symlink() or path.stat().st_size > FILE_LIMIT:
            raise StateInvalid(f"{path}: is no file of a conversation", path=path)
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=KeptConversation)
            self.messages(kept)
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise StateInvalid(f"{path}: holds no conversation: {error}", path=path) from error
        if kept.format != FORMAT:
            raise StateInvalid(f"{path}: format {kept.format}; known: {FORMAT}", path=path)
        return kept

    @staticmethod
    def messages(kept: KeptConversation) -> list[ChatMessage]:
        """The messages of a conversation, beginning with the system message if it has one."""
        return [ChatMessage(role=turn.role, content=turn.content, images=turn.images) for turn in kept.messages]

    def write(self, name: str, kept: KeptConversation) -> None:
        """Save a conversation atomically: on failure the old file stays. Raises `OSError` if writing fails."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(name)
        partial = path.with_name(f".{name}.partial-{os.getpid()}")
        try:
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(kept), indent=1))
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def listed(self) -> list[ListedConversation]:
        """All conversations, oldest first; for an unreadable one, `begins` is the error message."""
        found = []
        for name in self.ids():
            try:
                kept = self.read(name)
            except StateInvalid as error:
                found.append(ListedConversation(id=name, model="", answers=0, begins=error.message))
                continue
            said = [turn.content for turn in kept.messages if turn.role == "user"]
            begins = " ".join(said[0].split())[:60] if said else ""
            found.append(ListedConversation(id=name, model=kept.model, answers=len(said), begins=begins))
        return found

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"
