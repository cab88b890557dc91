"""Masks that are a band: a query sees so many places before and after itself, all of them."""

from __future__ import annotations

from typing import NamedTuple

from attn_core.mask.causal import Causal
from attn_core.mask.composite import Both
from attn_core.mask.full import Full
from attn_core.mask.mask import Mask
from attn_core.mask.segments import Segments
from attn_core.mask.window import Window


class Band(NamedTuple):
    """Places before and after itself that a query sees; None is no bound."""

    left: int | None
    right: int | None


def band_of(mask: Mask) -> Band | None:
    """The band that a mask is, or None where it is something else."""
    if isinstance(mask, Full):
        return Band(None, None)
    if isinstance(mask, Causal):
        return Band(None, 0)
    if isinstance(mask, Window) and mask.dilation == 1:
        return Band(mask.left, mask.right)
    if isinstance(mask, Both):
        one, other = band_of(mask.one), band_of(mask.other)
        if one is not None and other is not None:
            return _both(one, other)
    return None


class PackedBand(NamedTuple):
    """A band within each of the texts of these lengths, laid end to end."""

    band: Band
    lengths: tuple[int, ...]


def packed_band_of(mask: Mask) -> PackedBand | None:
    """The band within texts that a mask is, or None where it is something else."""
    if isinstance(mask, Segments):
        return PackedBand(Band(None, None), mask.lengths)
    if isinstance(mask, Both):
        for one, other in (mask.parts, mask.parts[::-1]):
            band, packed = band_of(one), packed_band_of(other)
            if band is not None and packed is not None:
                return packed._replace(band=_both(band, packed.band))
    return None


def _both(one: Band, other: Band) -> Band:
    return Band(_tighter(one.left, other.left), _tighter(one.right, other.right))


def _tighter(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)
