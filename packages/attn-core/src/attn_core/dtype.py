"""Element types by name, so that the contract needs no tensor library."""

from __future__ import annotations

from attn_core.errors import UnknownName

ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}
ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(name: str) -> str:
    """The full name of an element type, from its full or its short name (`bf16`)."""
    full = ALIASES.get(name, name)
    if full not in ELEMENT_BYTES:
        raise UnknownName.of("dtype", name, [*ELEMENT_BYTES, *ALIASES])
    return full


def element_bytes(name: str) -> int:
    """Bytes of one element of the type called `name`."""
    return ELEMENT_BYTES[dtype_name(name)]
