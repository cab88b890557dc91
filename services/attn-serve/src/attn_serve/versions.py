"""Versions of a model: `NAME@VERSION` beside `NAME`, and which of them a request goes to.

A request that names the model without a version goes to one of its versions, by their shares of the traffic. The
choice depends on what stays the same while a conversation goes on, so that a conversation stays with its version, at
every gateway; it changes only for conversations in the part of the traffic that is given to another version.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import msgspec
from attn_core.errors import InvalidValue, UnknownName
from attn_schema import Prompt

from attn_serve.routing import prompt_bytes

SEPARATOR = "@"


def base_name(name: str) -> str:
    """The name of a model without its version."""
    return name.partition(SEPARATOR)[0]


def conversation_key(prompt: Prompt, tenant: str) -> bytes:
    """Equal for all requests of one conversation of a tenant: its messages up to the first of the user.

    Of a text or of token ids it is the whole prompt, as nothing says where a conversation begins there.
    """
    if prompt.chat:
        first = next((place for place, turn in enumerate(prompt.chat) if turn.role == "user"), 0)
        prompt = msgspec.structs.replace(prompt, chat=prompt.chat[: first + 1])
    return tenant.encode() + b"\0" + prompt_bytes(prompt)


def pick(shares: Mapping[str, float], key: bytes) -> str:
    """The version of a conversation: for a fraction `shares[version]` of all keys it is this one.

    `shares` are at least 0 and not all 0. Of two versions, those keys alone change that a change of shares asks for.
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
    """The shares of all versions after some were given new ones: the others keep their proportions.

    Raises `UnknownName` for a version that is not loaded, `InvalidValue` for shares that are not in 0 to 1, or that
    leave something to nobody.
    """
    for version, share in given.items():
        if version not in present:
            raise UnknownName.of("version", version, present)
        if not (math.isfinite(share) and 0 <= share <= 1):
            raise InvalidValue.of(f"traffic of {version}", share, "0 to 1")
    left = 1 - sum(given.values())
    others = {version: share for version, share in present.items() if version not in given}
    if left < -1e-6 or (left > 1e-6 and not others):
        allowed = "shares that are 1 together, or less where other versions are loaded"
        raise InvalidValue.of("traffic", sum(given.values()), allowed)
    before = sum(others.values())
    scaled = {
        version: max(left, 0.0) * (share / before if before else 1 / len(others)) for version, share in others.items()
    }
    return {version: given.get(version, scaled.get(version, 0.0)) for version in present}
