"""The alphabet in which byte-level vocabularies spell bytes as printable characters."""

from __future__ import annotations

import re
from functools import cache

BLANK = "\u2581"
"""How sentencepiece writes a blank."""
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


@cache
def byte_of_character() -> dict[str, int]:
    """The byte that each of the 256 characters stands for.

    Printable Latin-1 bytes stand for themselves; the others are numbered from U+0100 in their order
    (GPT-2, Radford et al. 2019).
    """
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(themselves)]
    spelled = {chr(byte): byte for byte in themselves}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a sentencepiece token: <0xE2> is a byte, U+2581 a blank, everything else itself."""
    if BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(BLANK, " ").encode("utf-8")
