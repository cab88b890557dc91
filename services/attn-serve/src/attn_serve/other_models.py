"""The models that a gateway does not serve itself: which gateway serves them, or why none does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
from attn_core.errors import Unavailable, WrongState
from attn_gateway.records import GatewayRecord, ServedState
from attn_gateway.records import ServedModel as Record
from attn_gateway.records.gateways import World
from attn_schema import ModelInfo, ModelState

from attn_serve.versions import base_name

Key = tuple[str, str]
"""Owner and name of a model."""


class ServedElsewhere(WrongState):
    """Another gateway serves the model with engines of its own."""

    reason = "SERVED_ELSEWHERE"


@dataclass(frozen=True)
class OtherModels:
    """The recorded models in `world` without those that the gateway `me` serves, whose keys are `served`.

    `refused` holds the reasons why the gateway could not serve models of its own place; `shared` is whether other
    gateways may share that place.
    """

    world: World
    me: GatewayRecord
    shared: bool
    served: Collection[Key]
    refused: Mapping[Key, str]

    def infos(self, tenant: str | None) -> list[tuple[str, ModelInfo]]:
        """The owner and info of each model, once per name: a running gateway's record takes precedence."""
        found: dict[Key, Record] = {}
        for record in sorted(self._visible(tenant), key=self._is_left):
            found.setdefault(record.key, record)
        return [(record.owner, self._info(record)) for record in found.values()]

    def named(self, name: str, tenant: str | None) -> list[ModelInfo]:
        """The models of a name, or versions of it; the tenant's own before those available to all tenants."""
        found = [one for one in self.infos(tenant) if name in (one[1].name, base_name(one[1].name))]
        return [info for _, info in sorted(found, key=lambda one: (one[0] != (tenant or ""), one[1].name))]

    def left(self, name: str, tenant: str | None) -> list[Record]:
        """The records of a name whose model no gateway serves or loads any more."""
        return [record for record in self._visible(tenant) if record.name == name and self._is_left(record)]

    def require_none(self, name: str, tenant: str | None) -> None:
        """Raise `ServedElsewhere` for a name that another gateway serves, `Unavailable` for one that none serves now.

        Returns for an unknown name.
        """
        for info in self.named(name, tenant):
            if info.state is ModelState.ELSEWHERE:
                where = info.state_detail
                message = (
                    f"model {info.name!r} is served {where}, not by this one; call that one, or load the model here too"
                )
                raise ServedElsewhere(message, model=info.name, where=where)
            raise Unavailable(f"model {info.name!r} is {info.state}: {info.state_detail}", model=info.name)

    def _visible(self, tenant: str | None) -> list[Record]:
        return [
            record
            for record in self.world.models
            if record.visible_to(tenant) and record.state is not ServedState.UNLOADED and record.key not in self.served
        ]

    def _is_here(self, record: Record) -> bool:
        return record.place == self.me.place

    def _is_left(self, record: Record) -> bool:
        """Whether no gateway serves or loads the model of a record any more."""
        outlives = self.shared and self._is_here(record)
        return record.state is ServedState.FAILED or (not outlives and self.world.is_gone(record.gateway))

    def _info(self, record: Record) -> ModelInfo:
        state, detail = self._state(record)
        info = msgspec.json.decode(record.info, type=ModelInfo)
        known = {"name": record.name, "source": record.source, "base_model": record.base, "traffic": record.traffic}
        return info.replace(**known, state=state, state_detail=detail, replicas=0)

    def _state(self, record: Record) -> tuple[ModelState, str]:
        if record.state is ServedState.FAILED:
            return ModelState.FAILED, record.detail
        where = self._where(record.gateway)
        if self._is_here(record):
            if record.key in self.refused:
                return ModelState.FAILED, f"other gateways serve it, but this one failed to: {self.refused[record.key]}"
            return ModelState.LOADING, where
        if self.world.is_gone(record.gateway):
            return ModelState.FAILED, f"it was served {where}, which is gone"
        serves = record.state is ServedState.SERVING
        return ModelState.ELSEWHERE if serves else ModelState(record.state), where

    def _where(self, gateway: str) -> str:
        found = self.world.gateways.get(gateway)
        if found is None:
            return "by another gateway"
        return f"by the gateway {found.address}" + ("" if found.host == self.me.host else f" on {found.host}")
