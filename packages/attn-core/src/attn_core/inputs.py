"""What a layer is given, checked before it computes: a wrong shape that happens to fit gives wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from attn_core.config import MechanismConfig, require_droppable
from attn_core.errors import InvalidValue

if TYPE_CHECKING:
    from attn_core.mechanism import Mechanism

Build = Callable[["Mechanism", MechanismConfig], Any]


@dataclass(frozen=True)
class InputCheck:
    """Called before the `forward` of a layer of the mechanism called `name`, with what it is given."""

    name: str
    width: int

    def __call__(self, _layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise `InvalidValue` for rows that are not [batch, token, width] and padding that does not fit them."""
        taken = dict(zip(("query", "source"), given, strict=False)) | named
        query, source, keep = (taken.get(field) for field in ("query", "source", "keep"))
        if query is None:
            return
        self.check_rows("query", query, "[batch, query, width]")
        if source is not None:
            self.check_rows("source", source, "[batch, key, width]")
            if source.shape[0] != query.shape[0]:
                allowed = f"as many sequences as queries, {query.shape[0]}, in mechanism {self.name!r}"
                raise InvalidValue.of("source", tuple(source.shape), allowed)
        if keep is not None:
            self.check_keep(keep, query if source is None else source)

    def check_rows(self, field: str, rows: Any, axes: str) -> None:
        """Raise `InvalidValue` unless the rows have three axes and the width."""
        if rows.dim() != 3 or rows.shape[-1] != self.width:
            allowed = f"{axes} of width {self.width} in mechanism {self.name!r}"
            raise InvalidValue.of(field, tuple(rows.shape), allowed)

    def check_keep(self, keep: Any, rows: Any) -> None:
        """Raise `InvalidValue` unless it says of every row, by a bool, whether it is real."""
        if keep.dim() != 2 or keep.shape[0] != rows.shape[0] or keep.shape[1] != rows.shape[1]:
            allowed = f"{tuple(rows.shape[:2])}, [batch, key], in mechanism {self.name!r}"
            raise InvalidValue.of("keep", tuple(keep.shape), allowed)
        if str(keep.dtype) != "torch.bool":
            allowed = f"torch.bool, True where a key is real, in mechanism {self.name!r}"
            raise InvalidValue.of("keep", str(keep.dtype), allowed)


def checked(build: Build) -> Build:
    """`build`, whose errors name the mechanism, and whose layers check what they are given, once."""

    @wraps(build)
    def building(mechanism: Mechanism, config: MechanismConfig) -> Any:
        require_droppable(mechanism, config)
        try:
            layer = build(mechanism, config)
        except InvalidValue as error:
            raise error.in_mechanism(mechanism.name) from error
        hooks = getattr(layer, "_forward_pre_hooks", None)
        if hooks is not None and not any(isinstance(hook, InputCheck) for hook in hooks.values()):
            layer.register_forward_pre_hook(InputCheck(mechanism.name, config.width), with_kwargs=True)
        return layer

    return building
