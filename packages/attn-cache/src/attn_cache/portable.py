"""The state of one request as bytes: a safetensors file that any store of the same states and dtype can restore.

The file's metadata has one entry, a JSON object with sorted keys, so that equal states give equal bytes: the format
version, the dtype, the number of computed tokens, a description of all states with its SHA-256 ("fingerprint"), and
the SHA-256 of the whole file ("content", computed with zeros in its own place).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from attn_core import Paged, Slot, Source, StateSpec
from attn_core.errors import InvalidValue, StateInvalid
from attn_core.states import dtype_name
from attn_core.stores import ModelSpecs
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from attn_cache.kv_cache import first_visible
from attn_cache.memory import FieldKey, states_of, tensor_dtype

ENTRY = "attn_state"
VERSION = 2
"""Raised when the numbers in states mean something else: those of 1 had index keys without rotary positions."""
HEADER_LIMIT = 64 << 20
"""Largest header in bytes; a header has about 200 bytes for each field of each layer."""

_CONTENT_KEY = b'\\"content\\":\\"'
_BLANK_DIGEST = b"0" * 64

States = dict[str, dict[str, object]]
"""Kind, extent and fields (dtype and row shape) of every state, by `layer/state`."""


class StateLayout:
    """The states of a model whose default dtype is `dtype`, and the tensors that hold them for one request."""

    def __init__(self, specs: ModelSpecs, dtype: str) -> None:
        self.dtype = dtype_name(dtype)
        self._specs = [(layer, state, spec) for layer, state, spec in states_of(specs, StateSpec)]
        self.states: States = {f"{layer}/{state}": self._describe(spec) for layer, state, spec in self._specs}
        written = json.dumps(self.states, sort_keys=True)
        self.fingerprint = hashlib.sha256(written.encode()).hexdigest()

    def check(self, tokens: int, rows: Mapping[str, Tensor]) -> dict[FieldKey, Tensor]:
        """The tensors by layer, state and field; raises `StateInvalid` naming the first with another shape or dtype."""
        found: dict[FieldKey, Tensor] = {}
        for key, spec, name in self._fields():
            if name not in rows:
                raise StateInvalid.of(f"field {name}", "is missing", "every field of the store's states")
            given, field = rows[name], spec.fields[key[2]]
            dtype, shape = tensor_dtype(field.dtype or self.dtype), field.shape
            if not isinstance(spec, Slot):
                shape = (self._count(spec, tokens, rows[f"{key[0]}/{key[1]}/{next(iter(spec.fields))}"]), *shape)
            if given.dtype != dtype or tuple(given.shape) != shape:
                raise StateInvalid.of(f"field {name}", f"{given.dtype} {tuple(given.shape)}", f"{dtype} {shape}")
            found[key] = given
        unknown = sorted(rows.keys() - {name for _, _, name in self._fields()})
        if unknown:
            raise StateInvalid.of(f"field {unknown[0]}", "is unknown", "only fields of the store's states")
        return found

    def only(self, rows: Mapping[FieldKey, Tensor], kind: type[StateSpec]) -> dict[FieldKey, Tensor]:
        """The rows that belong to states of one kind."""
        return {key: rows[key] for key, spec, _ in self._fields() if isinstance(spec, kind)}

    def first_difference(self, states: Mapping[str, object]) -> str:
        """The first state, by name, whose description differs in `states`; "none" if all are equal."""
        names = sorted(self.states.keys() | states.keys())
        return next((name for name in names if self.states.get(name) != states.get(name)), "none")

    def _describe(self, spec: StateSpec) -> dict[str, object]:
        kind = next(kind for kind in (Paged, Slot, Source) if isinstance(spec, kind))
        extent = {"window": spec.window} if isinstance(spec, Paged) else {}
        if isinstance(spec, Paged) and spec.every > 1:
            extent = {"every": spec.every}
        if isinstance(spec, Source):
            extent = {"rows": spec.rows}
        fields = {
            name: [dtype_name(field.dtype or self.dtype), list(field.shape)] for name, field in spec.fields.items()
        }
        return {"kind": kind.__name__.lower(), **extent, "fields": fields}

    def _fields(self) -> Iterator[tuple[FieldKey, StateSpec, str]]:
        for layer, state, spec in self._specs:
            for field in spec.fields:
                yield (layer, state, field), spec, f"{layer}/{state}/{field}"

    def _count(self, spec: StateSpec, tokens: int, first: Tensor) -> int:
        """How many rows a state has after `tokens` tokens; `first` is the tensor of its first field."""
        if isinstance(spec, Paged):
            return tokens // spec.every - first_visible(tokens, spec.window)
        if isinstance(spec, Source) and spec.rows is not None:
            return spec.rows
        return first.shape[0] if first.ndim else 0


def pack(layout: StateLayout, tokens: int, rows: Mapping[FieldKey, Tensor]) -> bytes:
    """The bytes of a request of which `tokens` tokens are computed and whose state is `rows`."""
    header = {
        "version": VERSION,
        "dtype": layout.dtype,
        "tokens": tokens,
        "fingerprint": layout.fingerprint,
        "states": layout.states,
        "content": _BLANK_DIGEST.decode(),
    }
    # Copies: rows may share one allocation, which safetensors refuses, and the store goes on writing to it.
    tensors = {"/".join(key): tensor.to("cpu", copy=True).contiguous() for key, tensor in rows.items()}
    written = save(tensors, {ENTRY: json.dumps(header, sort_keys=True, separators=(",", ":"))})
    start = written.index(_CONTENT_KEY) + len(_CONTENT_KEY)
    digest = hashlib.sha256(written).hexdigest().encode()
    return b"".join((written[:start], digest, written[start + len(digest) :]))


def unpack(layout: StateLayout, exported: bytes) -> tuple[int, dict[FieldKey, Tensor]]:
    """The number of computed tokens and the rows; raises `StateInvalid` for damaged bytes or other states."""
    if not isinstance(exported, bytes):
        raise InvalidValue.of("exported", type(exported).__name__, "bytes")
    header = _header(exported)
    version = header.get("version")
    if version != VERSION:
        raise StateInvalid.of("version", version, f"{VERSION}, the only supported version")
    _check_content(exported, header.get("content"))
    if header.get("dtype") != layout.dtype:
        raise StateInvalid.of("dtype", header.get("dtype"), f"{layout.dtype}, the dtype of the store")
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
        raise StateInvalid.of("length", f"{len(exported)} bytes (truncated)", "a complete header and its tensors")
    try:
        header = json.loads(json.loads(exported[8 : 8 + length])["__metadata__"][ENTRY])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateInvalid.of("header", "not readable", f"a safetensors header with the entry {ENTRY}") from error
    if not isinstance(header, dict):
        raise StateInvalid.of("header", type(header).__name__, f"an object as the entry {ENTRY}")
    return header


def _check_content(exported: bytes, digest: object) -> None:
    start = exported.find(_CONTENT_KEY) + len(_CONTENT_KEY)
    found = hashlib.sha256(exported[:start])
    found.update(_BLANK_DIGEST)
    found.update(memoryview(exported)[start + len(_BLANK_DIGEST) :])
    if found.hexdigest() != digest:
        raise StateInvalid.of("content", f"sha256 {found.hexdigest()}", f"{digest}, the digest in the header")


def _refuse_states(layout: StateLayout, given: object) -> None:
    states = given if isinstance(given, dict) else {}
    name = layout.first_difference(states)
    if name == "none":
        raise StateInvalid.of("fingerprint", "does not match the states in the header", layout.fingerprint)
    raise StateInvalid.of(f"state {name}", states.get(name, "absent"), layout.states.get(name, "absent"))
