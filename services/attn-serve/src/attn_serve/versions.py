"""Versions of a model: `NAME@VERSION` beside `NAME`, and the choice between them for a request.

A request that names the model without a version goes to one of its versions, by their shares of the traffic. The
choice depends only on the beginning of a conversation, which does not change, so that a conversation stays with its
version at every gateway; it changes only for conversations in the fraction of traffic that moves to another version.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping

import msgspec
from attn_core.errors import InvalidValue, UnknownName
from attn_schema import Prompt

from attn_serve.routing import prompt_bytes

SEPARATOR = "@"
ALLOWED_NAMES = (
    "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 128 characters; or NAME@VERSION"
)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(@[A-Za-z0-9._-]{1,64})?")


def require_name(name: str, field: str = "name") -> None:
    """Raise `InvalidValue` for an invalid model name."""
    if not NAME.fullmatch(name):
        raise InvalidValue.of(field, name, ALLOWED_NAMES)


def base_name(name: str) -> str:
    """The name of a model without its version."""
    return name.partition(SEPARATOR)[0]


def conversation_key(prompt: Prompt, tenant: str) -> bytes:
    """A key that is equal for all requests of one conversation of a tenant: its messages up to the first user message.

    For a text or token ids it is the whole prompt, as these do not show where a conversation begins.
    """
    if prompt.chat:
        first = next((place for place, turn in enumerate(prompt.chat) if turn.role == "user"), 0)
        prompt = msgspec.structs.replace(prompt, chat=prompt.chat[: first + 1])
    return tenant.encode() + b"\0" + prompt_bytes(prompt)


def pick(shares: Mapping[str, float], key: bytes) -> str:
    """The version for a conversation key: each version gets the fraction `shares[version]` of all keys.

    `shares` are at least 0 and not all 0. With two versions, a change of shares moves no more keys than necessary.
    """
    point = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") / 2**64 * sum(shares.values())
    last = ""
    for version, share in sorted(shares.items()):
        if share > 0:
            last, point = version, point - share
            if point < 0:
                break
    return last


def new_shares(present: Mapping[str, float], given: Mapping[str, float]) -> dict[str, float]:
    """The shares of all versions after setting those in `given`: the others keep their proportions.

    Raises `UnknownName` for a version that is not loaded, and `InvalidValue` for shares outside 0 to 1, or that do not
    sum to 1 when no other version can take the rest.
    """
    for version, share in given.items():
        if version not in present:
            raise UnknownName.of("version", version, present)
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise InvalidValue.of(f"traffic of {version}", share, "0 to 1")
    left = 1 - sum(given.values())
    others = {version: share for version, share in present.items() if version not in given}
    if left < -1e-6 or (left > 1e-6 and not others):
        allowed = "shares that sum to 1, or to less if other versions are loaded"
        raise InvalidValue.of("traffic", sum(given.values()), allowed)
    before = sum(others.values())
    scaled = {
        version: max(left, 0.0) * (share / before if before else 1 / len(others)) for version, share in others.items()
    }
    return {version: given.get(version, scaled.get(version, 0.0)) for version in present}


def shares_wanted(traffic: Mapping[str, float | None]) -> dict[str, dict[str, float]]:
    """The traffic shares in a config file, by model and version; versions without a share divide the rest.

    Raises `InvalidValue` if the shares of a model do not sum to 1.
    """
    found: dict[str, dict[str, float]] = {}
    for model in sorted({base_name(name) for name in traffic}):
        versions = {name: share for name, share in traffic.items() if base_name(name) == model}
        given = {name: share for name, share in versions.items() if share is not None}
        found[model] = new_shares(dict.fromkeys(versions, 0.0), given)
    return found
