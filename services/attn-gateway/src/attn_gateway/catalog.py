"""CatalogService: the mechanisms installed on the server. It needs no package but the contract, attn-core."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import attn_core
from attn_core.errors import AttnError
from attn_core.options import option_fields
from attn_core.plugins.catalog import Catalog
from attn_core.plugins.loader import PluginStatus
from attn_schema import BrokenPlugin, Mechanism, MechanismOption, Paper, StateKind
from attn_schema.methods import (
    CATALOG,
    GetMechanismRequest,
    GetMechanismResponse,
    ListMechanismsRequest,
    ListMechanismsResponse,
    Row,
)
from msgspec import UNSET

from attn_gateway.call import Call
from attn_gateway.calls import Handler, handlers_of
from attn_gateway.paging import page_of

STATE_KINDS: dict[type[attn_core.StateSpec], StateKind] = {
    attn_core.Paged: StateKind.PAGED,
    attn_core.Slot: StateKind.SLOT,
    attn_core.Source: StateKind.SOURCE,
}
SAMPLE_WIDTH = 64
"""The hidden size for which a mechanism's states are computed; their kinds do not depend on it."""


class CatalogService:
    """The catalogue service, as an `attn_gateway.service.Service`."""

    names = (CATALOG,)

    def __init__(self, catalog: Catalog | None = None) -> None:
        self._given = catalog
        self._mechanisms: list[Mechanism] = []

    @property
    def _catalog(self) -> Catalog:
        return self._given or attn_core.installed()

    def handlers(self) -> dict[Row, Handler]:
        """The handlers of the calls."""
        return handlers_of(CATALOG, self)

    async def start(self) -> None:
        """Read the catalogue in a thread, as this imports plugins."""
        self._mechanisms = await asyncio.to_thread(mechanisms_of, self._catalog)

    async def stop(self, shutdown_timeout: float) -> None:
        """Do nothing: the service holds no resources."""

    async def list_mechanisms(self, request: ListMechanismsRequest, _: Call) -> ListMechanismsResponse:
        """Return a page of mechanisms; the first page also lists broken plugins."""
        page, following = page_of(self._mechanisms, request)
        broken = [] if request.page_token else broken_plugins(self._catalog)
        return ListMechanismsResponse(mechanisms=tuple(page), next_page_token=following, broken_plugins=tuple(broken))

    async def get_mechanism(self, request: GetMechanismRequest, _: Call) -> GetMechanismResponse:
        """Return one mechanism, by short or full name."""
        full = self._catalog.mechanisms.full_name(request.name)
        found = next(m for m in self._mechanisms if f"{m.distribution}/{m.name}" == full)
        return GetMechanismResponse(mechanism=found)


def mechanisms_of(catalog: Catalog) -> list[Mechanism]:
    """Every mechanism of the catalogue, sorted by name, then distribution."""
    versions = {plugin.distribution: plugin.version for plugin in catalog.plugins}
    found = []
    for shown in catalog.mechanisms.names():
        mechanism, owner = catalog.mechanisms.get(shown), catalog.mechanisms.owner(shown)
        found.append(described(mechanism, owner, versions.get(owner, ""), ambiguous=shown != mechanism.name))
    return sorted(found, key=lambda each: (each.name, each.distribution))


def described(mechanism: attn_core.Mechanism, distribution: str, version: str, *, ambiguous: bool) -> Mechanism:
    """The catalogue entry of a mechanism."""
    paper = mechanism.paper
    return Mechanism(
        name=mechanism.name,
        distribution=distribution,
        version=version,
        summary=mechanism.summary,
        paper=Paper(title=paper.title, authors=paper.authors, year=paper.year, arxiv=paper.arxiv or ""),
        equation=mechanism.equation,
        capabilities=tuple(sorted(mechanism.capabilities)),
        state_kinds=state_kinds(mechanism),
        options=tuple(option(mechanism, name, default) for name, default in option_fields(mechanism).items()),
        ambiguous=ambiguous,
    )


def option(mechanism: attn_core.Mechanism, name: str, default: Any) -> MechanismOption:
    """An option of a mechanism, with its type and default."""
    field = next(field for field in dataclasses.fields(mechanism.Config) if field.name == name)
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    given = UNSET if default is dataclasses.MISSING else default
    return MechanismOption(name=name, type=kind, default_value=given, description=field.metadata.get("help", ""))


def state_kinds(mechanism: attn_core.Mechanism) -> tuple[StateKind, ...]:
    """The kinds of state kept between decoding steps with default options; empty if that needs required options."""
    try:
        specs = mechanism.state(attn_core.configure(mechanism, hidden_size=SAMPLE_WIDTH))
    except AttnError:
        return ()
    found = {kind for spec in specs.values() for cls, kind in STATE_KINDS.items() if isinstance(spec, cls)}
    return tuple(kind for kind in StateKind if kind in found)


def broken_plugins(catalog: Catalog) -> list[BrokenPlugin]:
    """The plugins that could not be used, with their reasons."""
    well = (PluginStatus.OK, PluginStatus.NOT_SELECTED)
    return [
        BrokenPlugin(distribution=plugin.distribution, version=plugin.version, reason=plugin.reason)
        for plugin in catalog.plugins
        if plugin.status not in well
    ]
