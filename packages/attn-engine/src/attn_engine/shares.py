"""Who was served how much: between tenants of equal priority, the one that had least for its weight comes next.

Sheng et al. 2024, "Fairness in Serving Large Language Models", arXiv 2401.00588: a counter of tokens for each tenant,
and one who comes back from idleness begins where the least served of the others is, so that nobody saves up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Shares:
    """Tokens that each tenant was served, divided by its weight; a tenant without a weight has 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._served: dict[str, float] = {}

    def settle(self, active: Iterable[str]) -> None:
        """Take note of who has work now. Debts of those who have none are kept while others are behind them."""
        now = set(active)
        least = min((self._served[tenant] for tenant in now if tenant in self._served), default=0.0)
        kept = {tenant: served for tenant, served in self._served.items() if tenant in now or served > least}
        self._served = kept | {tenant: max(kept.get(tenant, least), least) for tenant in now}

    def charge(self, tenant: str, tokens: int) -> None:
        """Count what a tenant is given."""
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._weights.get(tenant, 1.0)

    def served(self, tenant: str) -> float:
        """What a tenant was given, for its weight; only differences mean anything."""
        return self._served.get(tenant, 0.0)
