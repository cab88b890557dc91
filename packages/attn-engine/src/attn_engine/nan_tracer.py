"""Finds the layer in which a computation failed or produced values that are not finite.

It works for any module: the states that a model accesses show which layer is running, and hooks on its modules detect
the first values that are not finite.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from attn_core import Fields, LayerState
from attn_core.batch import ModelState
from attn_core.errors import LayerFailed
from attn_core.models import LanguageModel, NamedMechanisms
from torch import Tensor, nn

NOT_FINITE = "its values are not finite"


class NanTracer:
    """Context manager that observes the modules of a model, in the thread that created it.

    Observed states do not offer in-place access to their rows, so that no kernel writes several layers at once.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._module = cast("nn.Module", model)
        self._layers = frozenset(model.state_specs())
        named = model.layer_mechanisms() if isinstance(model, NamedMechanisms) else {}
        self._mechanisms: Mapping[str, str] = named
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []
        self._inside: list[str] = []
        self._looked_up: str | None = None
        self._accessed: str | None = None
        self._blamed: str | None = None
        self._output_finite = False
        self.failure: LayerFailed | None = None
        """The error that names the first layer with values that are not finite; None if there is none."""

    def __enter__(self) -> NanTracer:
        for name, module in self._module.named_modules():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
            self._hooks.append(module.register_forward_hook(lambda *seen, name=name: self._leave(name, *seen)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def observed(self, state: ModelState) -> ModelState:
        """The state, with views that record which layer accesses them."""
        return _ObservedMapping(
            {layer: self._of_layer(layer, views) for layer, views in state.items()}, self._record_lookup
        )

    def blame(self, error: Exception) -> LayerFailed | None:
        """An error that names the layer in which `error` was raised; None if it was raised before the first layer."""
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return self._failed(self._inside[-1] if self._inside else None, self._looked_up, what)

    def check_output(self, hidden: Tensor) -> None:
        """Record a failure if the last hidden states are not finite and no module has been found at fault."""
        if self.failure is None and not _finite(hidden):
            self.failure = self._failed(None, self._accessed, NOT_FINITE)

    def _of_layer(self, layer: str, views: LayerState) -> LayerState:
        def written(fields: Fields) -> None:
            self._written(layer, fields)

        observed = {name: _ObservedView(view, written) for name, view in views.items()}
        return _ObservedMapping(observed, lambda _: self._record_access(layer))

    def _record_lookup(self, layer: str) -> None:
        self._looked_up = layer

    def _record_access(self, layer: str) -> None:
        # A layer whose state was only looked up may not have begun: its input can still come from the previous layer.
        if layer != self._accessed:
            # Its first writes stem from the previous layer, unless a module has returned finite values since.
            self._blamed = layer if self._output_finite or self._accessed is None else self._accessed
            self._output_finite = False
        self._looked_up = self._accessed = layer

    def _written(self, layer: str, fields: Fields) -> None:
        if all(_finite(rows) for rows in fields.values()):
            self._blamed = layer
        elif self.failure is None:
            self.failure = self._failed(None, self._blamed, NOT_FINITE)

    def _enter(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self._inside.append(name)

    def _leave(self, name: str, _module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._inside.pop()
        if self.failure is None and not all(_finite(value) for value in given):
            self.failure = self._failed(None, self._accessed, NOT_FINITE)
        elif self.failure is None and not _finite(output):
            self.failure = self._failed(name, None, NOT_FINITE)
        else:
            self._output_finite = True

    def _failed(self, module: str | None, layer: str | None, what: str) -> LayerFailed | None:
        if module:
            parts = module.split(".")
            outer = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
            layer = next((name for name in outer if name in self._layers), None)
            what = f"in {module}, {what}" if layer not in (None, module) else what
        if layer is None and not module:
            return None
        return LayerFailed.of(layer or str(module), self._mechanisms.get(layer or ""), what)


class _ObservedMapping(Mapping[str, Any]):
    """A mapping that reports the keys that are looked up."""

    def __init__(self, found: Mapping[str, Any], report: Callable[[str], None]) -> None:
        self._found = found
        self._report = report

    def __getitem__(self, key: str) -> Any:
        value = self._found[key]
        self._report(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


class _ObservedView:
    """A view that reports what is written to it, and offers no in-place access to its rows."""

    def __init__(self, view: Any, report: Callable[[Fields], None]) -> None:
        self._view = view
        self._report = report

    def append(self, fields: Fields) -> Fields:
        """Report the new rows of tokens and append them; returns what the view returns."""
        self._report(fields)
        rows: Fields = self._view.append(fields)
        return rows

    def write(self, fields: Fields) -> None:
        """Report the new states of fixed size and write them."""
        self._report(fields)
        self._view.write(fields)

    def in_place(self) -> None:
        """Return None, as a kernel that writes several layers at once would hide which of them failed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    return not isinstance(value, tuple | list) or all(_finite(item) for item in value)
