"""Which layer's keys and values each layer of a stack attends to."""

from __future__ import annotations

from collections.abc import Sequence

from attn_core.errors import InvalidValue

Lenders = str | tuple[int, ...]
"""A word for a whole stack, or for every layer the one it borrows from, itself where it has its own; () for that.

"cla:2" joins every 2 neighbours, the first of which lends (cross-layer attention, Brandon et al. 2024, arXiv
2405.12981); "yoco" lets the upper half attend to what its first layer lends (decoder-decoder, Sun et al. 2024, arXiv
2405.05254).
"""

NEIGHBOURS = "cla:"
UPPER_HALF = "yoco"
FORMS = "'cla:N', 'yoco', or for every layer the number of the one that lends to it"


def checked_lenders(given: object, layers: int) -> Lenders:
    """What was given, if it is a word or fits so many layers; raises `InvalidValue` otherwise."""
    if isinstance(given, str) and (given == UPPER_HALF or _joined(given)):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidValue.of("lenders", given, FORMS)
    if given and len(given) != layers:
        raise InvalidValue.of("lenders", list(given), f"{layers} entries, one for each layer, or none")
    found: list[int] = []
    for layer, lender in enumerate(given):
        if not isinstance(lender, int) or isinstance(lender, bool) or not 0 <= lender <= layer:
            raise InvalidValue.of(f"lenders[{layer}]", lender, f"a layer from 0 to {layer}")
        if lender < layer and found[lender] != lender:
            raise InvalidValue.of(f"lenders[{layer}]", lender, f"{layer}, or a layer with keys and values of its own")
        found.append(lender)
    return tuple(found)


def lender_of(lenders: Lenders, layer: int, layers: int) -> int:
    """The layer to whose keys and values this one of so many attends: itself where it has its own."""
    if lenders == UPPER_HALF:
        return min(layer, layers // 2)
    if isinstance(lenders, str):
        return layer - layer % _joined(lenders)
    return lenders[layer] if lenders else layer


def _joined(words: str) -> int:
    """N of "cla:N"; 0 where it is something else."""
    count = words.removeprefix(NEIGHBOURS)
    return int(count) if words.startswith(NEIGHBOURS) and count.isascii() and count.isdecimal() else 0
