"""The alphabet in which byte-level vocabularies spell bytes as printable characters."""

from __future__ import annotations

from functools import cache


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
