"""Tenants with their tokens, roles and limits, from a file that may change while the server runs."""

from __future__ import annotations

import hmac
import math
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import structlog
from attn_core.errors import AttnError, InvalidValue, UserError
from attn_schema.text_files import UTF8, lines_of

from attn_gateway.call import tenant_named

log = structlog.get_logger()

Role: TypeAlias = Literal["admin", "user"]
"""An admin may see and change everything; a user what its tenant owns, and may use what is available to all."""
FIELD = "token_file"
NAME_LENGTH = 64


MAX_MODELS = 8
"""The models that a tenant may have loaded at the same time, unless its line of the token file says otherwise."""
MAX_MEMORY_BYTES = 64 * 2**30
"""The memory that these may take together, likewise."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A group of callers with common ownership and limits. None is no limit; `weight` is the share in fair queueing.

    `tokens_per_minute` counts tokens of prompts and completions, `max_running` the calls that run at the same time,
    `max_models` the models of its own that are loaded, `max_memory_bytes` the memory for their weights and KV caches;
    an admin's belong to all tenants, and are not limited.
    """

    name: str
    role: Role = "user"
    weight: float = 1.0
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_running: float | None = None
    max_models: float | None = MAX_MODELS
    max_memory_bytes: float | None = MAX_MEMORY_BYTES

    @property
    def is_admin(self) -> bool:
        """Whether it may see and change what other tenants own."""
        return self.role == "admin"


LIMITS = ("requests_per_minute", "tokens_per_minute", "max_running", "max_models", "max_memory_bytes")


class Tenants:
    """The tenants by their tokens. Used from one event loop; `reload` applies a file's new content, if it is valid."""

    def __init__(self, by_token: Mapping[str, Tenant], path: Path | None = None) -> None:
        self._path = path
        self._stamp = _stamp(path)
        self._set(by_token)

    @classmethod
    def of_tokens(cls, tokens: Sequence[str]) -> Tenants:
        """One tenant per token; the first is an admin."""
        return cls({token: Tenant(name=tenant_named(token), role=_role(place)) for place, token in enumerate(tokens)})

    @classmethod
    def of_file(cls, path: Path) -> Tenants:
        """The tenants of a token file; raises `UserError` as `read_tenants`."""
        return cls(read_tenants(path), path)

    def __bool__(self) -> bool:
        """Whether callers need a token."""
        return bool(self._expected)

    def all(self) -> list[Tenant]:
        """All tenants, each once."""
        return list(self._by_name.values())

    def named(self, name: str) -> Tenant | None:
        """The tenant of this name; None if there is none."""
        return self._by_name.get(name)

    def of(self, authorization: Iterable[str]) -> Tenant | None:
        """The tenant of a call with these values of `authorization`; None for a wrong, missing or repeated token."""
        given = [value.encode() for value in authorization]
        found = None
        for expected, tenant in self._expected:
            # All tokens are compared, so that the time reveals nothing about a partial match.
            if hmac.compare_digest(given[0] if given else b"", expected):
                found = tenant
        return found if len(given) == 1 else None

    def reload(self) -> bool:
        """Read the file again; returns whether it was applied. Errors are logged, and the old tokens stay."""
        if self._path is None:
            return False
        self._stamp = _stamp(self._path)
        try:
            self._set(read_tenants(self._path))
        except AttnError as error:
            log.error("the token file could not be reloaded; the previous tokens stay valid", reason=error.message)
            return False
        log.info("token file reloaded", tenants=len(self.all()))
        return True

    def reload_if_changed(self) -> bool:
        """Call `reload` if the file has changed since it was read."""
        return _stamp(self._path) != self._stamp and self.reload()

    def _set(self, by_token: Mapping[str, Tenant]) -> None:
        self._expected = [(f"Bearer {token}".encode(), tenant) for token, tenant in by_token.items()]
        self._by_name = {tenant.name: tenant for tenant in by_token.values()}


def read_tenants(path: Path) -> dict[str, Tenant]:
    """Read the tenants, by token, of a token file, which only its owner may be able to read.

    Each line is a token, then its tenant's weight or settings: `TOKEN tenant=ann role=user weight=2 max_running=4
    requests_per_minute=60 tokens_per_minute=20000 max_models=2 max_memory_bytes=8e9`. Each token of a tenant has its
    own line, and the first of them the tenant's settings; a tenant without a name is identified by its token. The
    tenant of the first line is an admin unless its `role` is set. Raises `UserError` for an invalid file; errors do not
    quote tokens.
    """
    try:
        mode = path.stat().st_mode
        lines = lines_of(path.read_text(UTF8, errors="replace"))
    except OSError as error:
        raise InvalidValue(f"{FIELD}: {path}: {error.strerror or error}", field=FIELD, given=path) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(f"{FIELD}: {path} can be read by others; run: chmod 600 {path}", field=FIELD)
    found: dict[str, Tenant] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if words:
            _add(found, words[0], words[1:], f"{FIELD}: line {number}")
    if not found:
        raise UserError(f"{FIELD}: {path} is empty", field=FIELD)
    return found


def _add(found: dict[str, Tenant], token: str, words: list[str], place: str) -> None:
    if not token.isascii() or not token.isprintable():
        raise UserError(f"{place}: a token must be printable ASCII", field=FIELD)
    settings = _settings(words, place)
    name = settings.pop("tenant", None) or (found[token].name if token in found else tenant_named(token))
    known = next((tenant for tenant in found.values() if tenant.name == name), None)
    if token in found and found[token].name != name:
        raise UserError(f"{place}: the token is already on another line, with another tenant", field=FIELD)
    tenant = known or Tenant(name=name, role=_role(len(found)))
    values: dict[str, Any] = {key: _number(key, text, place) for key, text in settings.items() if key != "role"}
    if "role" in settings:
        values["role"] = settings["role"]
    changed = replace(tenant, **values)
    if known is not None and changed != known:
        raise UserError(f"{place}: the tenant is already on another line, with other settings", field=FIELD)
    found[token] = changed


def _settings(words: list[str], place: str) -> dict[str, str]:
    allowed = ("tenant", "role", "weight", *LIMITS)
    settings: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals and len(words) == 1:
            key, text = "weight", word
        if key not in allowed or key in settings or not text:
            keys = ", ".join(allowed)
            raise UserError(
                f"{place}: after the token only a weight, or KEY=VALUE with {keys}, may follow", field=FIELD
            )
        settings[key] = text
    if settings.get("role", "user") not in get_args(Role):
        raise UserError(f"{place}: role must be one of {', '.join(get_args(Role))}", field=FIELD)
    name = settings.get("tenant", "x")
    if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum() and len(name) <= NAME_LENGTH):
        raise UserError(f"{place}: tenant must be at most {NAME_LENGTH} letters, digits, '-' and '_'", field=FIELD)
    return settings


def _number(key: str, text: str, place: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf or (key == "max_running" and number != int(number)):
        raise UserError(
            f"{place}: {key} must be a {'whole ' if key == 'max_running' else ''}number above 0", field=FIELD
        )
    return number


def _role(place: int) -> Role:
    return "user" if place else "admin"


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    """A value that changes when the file is written or replaced: modification time, size and inode."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
