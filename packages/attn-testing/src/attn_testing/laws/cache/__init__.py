"""Laws of caches, one a file."""

from __future__ import annotations

from attn_testing.law import Law
from attn_testing.laws.cache.live_bytes import LiveBytes
from attn_testing.laws.cache.refuses_when_full import RefusesWhenFull
from attn_testing.laws.cache.release_frees_all import ReleaseFreesAll
from attn_testing.laws.cache.views_equal import ViewsEqual

CACHE_LAWS: tuple[type[Law], ...] = (ViewsEqual, RefusesWhenFull, ReleaseFreesAll, LiveBytes)

__all__ = ["CACHE_LAWS", "LiveBytes", "RefusesWhenFull", "ReleaseFreesAll", "ViewsEqual"]
