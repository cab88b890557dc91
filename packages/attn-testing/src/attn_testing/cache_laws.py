"""Every law of caches in one class."""

from __future__ import annotations

from typing import ClassVar

from attn_core import CacheFamily

from attn_testing.cache_subject import CacheSubject
from attn_testing.laws import cache
from attn_testing.suite import Suite


class CacheSuite(Suite):
    """What a test class says of the cache it tests: `family`, a name or an object."""

    family: ClassVar[str | CacheFamily]

    @classmethod
    def make_subject(cls) -> CacheSubject:
        """The cache and the models it is tried for."""
        return CacheSubject(cls.family)


class CacheLaws(CacheSuite, cache.ViewsEqual, cache.RefusesWhenFull, cache.ReleaseFreesAll, cache.LiveBytes):
    """Every law. A cache's test file inherits this and names its family."""

    laws = cache.CACHE_LAWS
