"""Exported states: tensors in the safetensors format, and a header that says of what, how far, and their hash.

The header has one entry of ours, a JSON object with sorted keys, so that equal states have equal bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from attn_core.errors import InvalidValue, StateInvalid
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attn_cache.bank import Key
from attn_cache.portable.layout import StateLayout

ENTRY = "attn_state"
VERSION = 1
HEADER_LIMIT = 64 << 20
"""Bytes; a header has some 200 bytes for each field of each layer."""

_MARK = b'\\"content\\":\\"'
_BLANK = b"0" * 64


def pack(layout: StateLayout, tokens: int, rows: Mapping[Key, Tensor]) -> bytes:
    """The bytes of a request of which `tokens` tokens are computed and that holds `rows`."""
    header = {
        "version": VERSION,
        "dtype": layout.dtype,
        "tokens": tokens,
        "fingerprint": layout.fingerprint,
        "states": layout.states,
        "content": _BLANK.decode(),
    }
    # Copies: rows may be parts of one allocation, which the format refuses, and the store goes on writing to it.
    tensors = {"/".join(key): tensor.to("cpu", copy=True).contiguous() for key, tensor in rows.items()}
    written = save(tensors, {ENTRY: json.dumps(header, sort_keys=True, separators=(",", ":"))})
    start = written.index(_MARK) + len(_MARK)
    digest = hashlib.sha256(written).hexdigest().encode()
    return b"".join((written[:start], digest, written[start + len(digest) :]))


def unpack(layout: StateLayout, exported: bytes) -> tuple[int, dict[Key, Tensor]]:
    """The computed tokens and the rows; raises `StateInvalid` for bytes that are not whole or of other states."""
    if not isinstance(exported, bytes):
        raise InvalidValue.of("exported", type(exported).__name__, "bytes")
    header = _header(exported)
    version = header.get("version")
    if version != VERSION:
        raise StateInvalid.of("version", version, f"{VERSION}, the only one that this program reads")
    _check_content(exported, header.get("content"))
    if header.get("dtype") != layout.dtype:
        raise StateInvalid.of("dtype", header.get("dtype"), f"{layout.dtype}, the store's")
    if header.get("fingerprint") != layout.fingerprint or header.get("states") != layout.states:
        _refuse_states(layout, header.get("states"))
    tokens = header.get("tokens")
    if type(tokens) is not int or tokens < 0:
        raise StateInvalid.of("tokens", tokens, "a whole number from 0")
    try:
        rows = load(exported)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StateInvalid.of("tensors", error, "tensors in the safetensors format") from error
    return tokens, layout.check(tokens, rows)


def _header(exported: bytes) -> dict[str, Any]:
    length = int.from_bytes(exported[:8], "little")
    if len(exported) < 8 or length > min(HEADER_LIMIT, len(exported) - 8):
        raise StateInvalid.of("length", f"{len(exported)} bytes", "a whole header and its tensors; they were cut off")
    try:
        header = json.loads(json.loads(exported[8 : 8 + length])["__metadata__"][ENTRY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateInvalid.of("header", "not readable", f"a safetensors header with the entry {ENTRY}") from error
    if not isinstance(header, dict):
        raise StateInvalid.of("header", type(header).__name__, f"an object as the entry {ENTRY}")
    return header


def _check_content(exported: bytes, digest: object) -> None:
    start = exported.find(_MARK) + len(_MARK)
    found = hashlib.sha256(exported[:start])
    found.update(_BLANK)
    found.update(memoryview(exported)[start + len(_BLANK) :])
    if found.hexdigest() != digest:
        raise StateInvalid.of("content", f"sha256 {found.hexdigest()}", f"{digest}, as the header says")


def _refuse_states(layout: StateLayout, given: object) -> None:
    states = given if isinstance(given, dict) else {}
    name = layout.differing(states)
    if name == "none":
        raise StateInvalid.of("fingerprint", "not that of the states beside it", layout.fingerprint)
    raise StateInvalid.of(f"state {name}", states.get(name, "absent"), layout.states.get(name, "absent"))
