"""The laws of the conformance kit."""

from __future__ import annotations

from attn_testing import CacheLaws


class TestContiguous(CacheLaws):
    family = "contiguous"


class TestPaged(CacheLaws):
    family = "paged"


class TestShared(CacheLaws):
    family = "shared"
