# ruff: noqa: ARG002, N802 - names and arguments of calls are the interface's
"""CatalogService: the mechanisms installed on the server. It needs nothing but the contract."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import attn_core
import grpc.aio
from attn.v1 import catalog_pb2 as pb
from attn.v1.catalog_pb2_grpc import CatalogServiceServicer, add_CatalogServiceServicer_to_server
from attn_core.errors import AttnError
from attn_core.options import option_fields
from attn_core.plugins.catalog import Catalog
from attn_core.plugins.loader import PluginStatus
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Value

from attn_gateway.call import Context
from attn_gateway.paging import page_of

STATE_KINDS: dict[type[attn_core.StateSpec], pb.StateKind.ValueType] = {
    attn_core.Paged: pb.STATE_KIND_PAGED,
    attn_core.Slot: pb.STATE_KIND_SLOT,
    attn_core.Source: pb.STATE_KIND_SOURCE,
}
SAMPLE_WIDTH = 64
"""The width at which a mechanism is asked what it remembers; the kinds do not depend on it."""


class CatalogGrpc:
    """The service as the gateway wants it."""

    names = ("attn.v1.CatalogService",)

    def __init__(self, catalog: Catalog | None = None) -> None:
        self._servicer = CatalogServicer(catalog)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add the servicer to the server."""
        add_CatalogServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Load the catalogue."""
        await self._servicer.load()

    async def stop(self, grace: float) -> None:
        """Nothing is held."""


class CatalogServicer(CatalogServiceServicer):
    """The calls."""

    def __init__(self, catalog: Catalog | None = None) -> None:
        self._given = catalog
        self._mechanisms: list[pb.Mechanism] = []

    @property
    def _catalog(self) -> Catalog:
        return self._given or attn_core.installed()

    async def load(self) -> None:
        """Read the catalogue in a thread, as plugins are imported."""
        self._mechanisms = await asyncio.to_thread(messages, self._catalog)

    async def ListMechanisms(self, request: pb.ListMechanismsRequest, context: Context) -> pb.ListMechanismsResponse:
        """A page of mechanisms; the first tells of broken plugins, too."""
        page, following = page_of(self._mechanisms, request)
        response = pb.ListMechanismsResponse(mechanisms=page, next_page_token=following)
        if not request.page_token:
            response.broken_plugins.extend(broken_plugins(self._catalog))
        return response

    async def GetMechanism(self, request: pb.GetMechanismRequest, context: Context) -> pb.GetMechanismResponse:
        """One mechanism, by short or full name."""
        full = self._catalog.mechanisms.full_name(request.name)
        found = next(m for m in self._mechanisms if f"{m.distribution}/{m.name}" == full)
        return pb.GetMechanismResponse(mechanism=found)


def messages(catalog: Catalog) -> list[pb.Mechanism]:
    """Every mechanism of the catalogue as a message, sorted by name, then distribution."""
    versions = {plugin.distribution: plugin.version for plugin in catalog.plugins}
    found = []
    for shown in catalog.mechanisms.names():
        message = mechanism_message(catalog.mechanisms.get(shown))
        message.distribution = catalog.mechanisms.owner(shown)
        message.version = versions.get(message.distribution, "")
        message.ambiguous = shown != message.name
        found.append(message)
    return sorted(found, key=lambda message: (message.name, message.distribution))


def mechanism_message(mechanism: attn_core.Mechanism) -> pb.Mechanism:
    """What the mechanism says of itself."""
    return pb.Mechanism(
        name=mechanism.name,
        summary=mechanism.summary,
        paper=pb.Paper(
            title=mechanism.paper.title,
            authors=mechanism.paper.authors,
            year=mechanism.paper.year,
            arxiv=mechanism.paper.arxiv or "",
        ),
        equation=mechanism.equation,
        capabilities=sorted(mechanism.capabilities),
        state_kinds=state_kinds(mechanism),
        options=[option_message(mechanism, name, default) for name, default in option_fields(mechanism).items()],
    )


def option_message(mechanism: attn_core.Mechanism, name: str, default: Any) -> pb.MechanismOption:
    """An option with its type and default; a default that JSON cannot hold is given as text."""
    field = next(field for field in dataclasses.fields(mechanism.Config) if field.name == name)
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    option = pb.MechanismOption(name=name, type=kind, description=field.metadata.get("help", ""))
    if default is not dataclasses.MISSING:
        try:
            option.default_value.CopyFrom(json_format.ParseDict(default, Value()))
        except json_format.ParseError:
            option.default_value.string_value = str(default)
    return option


def state_kinds(mechanism: attn_core.Mechanism) -> list[pb.StateKind.ValueType]:
    """What it remembers with default options; nothing where it needs options to say."""
    try:
        specs = mechanism.state(attn_core.configure(mechanism, width=SAMPLE_WIDTH))
    except AttnError:
        return []
    return sorted({kind for spec in specs.values() for cls, kind in STATE_KINDS.items() if isinstance(spec, cls)})


def broken_plugins(catalog: Catalog) -> list[pb.BrokenPlugin]:
    """The plugins that could not be used, with the reason."""
    well = (PluginStatus.OK, PluginStatus.NOT_SELECTED)
    return [
        pb.BrokenPlugin(distribution=plugin.distribution, version=plugin.version, reason=plugin.reason)
        for plugin in catalog.plugins
        if plugin.status not in well
    ]
