"""The fields that name stored objects: models, tokenizers and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from attn_schema.schema import fields_of, is_noun


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a field names: the path of the field, such as data.dataset, the kind of the object, and the given text."""

    field: str
    kind: str
    text: str


def references_of(noun: msgspec.Struct, place: str = "") -> Iterator[Reference]:
    """All references to stored objects in a noun and the nouns in it; fields that are empty or None name nothing."""
    for info in fields_of(type(noun)):
        value = getattr(noun, info.name)
        if is_noun(info.kind) and value is not None:
            yield from references_of(value, f"{place}{info.name}.")
        elif "names" in info.extra and value:
            yield Reference(field=f"{place}{info.name}", kind=info.extra["names"], text=value)
