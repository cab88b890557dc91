"""The laws of the conformance kit."""

from __future__ import annotations

from attn_cache import Kivi4Cache, KiviCache, KiviLayout
from attn_testing import CacheLaws


class TestContiguous(CacheLaws):
    family = "contiguous"


class TestPaged(CacheLaws):
    family = "paged"


class TestShared(CacheLaws):
    family = "shared"


class TestInt8(CacheLaws):
    family = "int8"


class TestInt4(CacheLaws):
    family = "int4"


class TestKivi(CacheLaws):
    family = "kivi"


class TestKiviOfShortBlocks(CacheLaws):
    family = KiviCache(KiviLayout(block=8, group=4))


class TestKivi4OfShortBlocks(CacheLaws):
    family = Kivi4Cache(KiviLayout(bits=4, block=4, group=2))
