"""Clear errors for a model step that was given the wrong states, diagnosed after a failure at no cost to other steps.

A store is made from the `state_specs` of a model. One that was made by hand, or for another model, has other names,
fields or shapes; the error that follows deep in a layer, such as `KeyError: 'inputs'`, does not show that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from attn_core.batch import ModelState, RaggedBatch
from attn_core.errors import AttnError, WrongState
from attn_core.states import StateSpec, StateSpecs

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

ModelStep = Callable[[Any, Tensor, RaggedBatch, ModelState], Tensor]


def described(specs: StateSpecs) -> str:
    """A text that lists a layer's states by kind, name and row shapes: "Paged 'kv' (key [2, 4], value [2, 4])"."""
    return ", ".join(f"{type(spec).__name__} {name!r} ({_text(_shapes(spec))})" for name, spec in specs.items()) or (
        "nothing"
    )


def names_wrong_states(step: ModelStep) -> ModelStep:
    """Wrap the `step` of a model so that it raises `WrongState`, with names and shapes, if it fails on wrong states."""

    @wraps(step)
    def stepping(model: Any, tokens: Tensor, batch: RaggedBatch, state: ModelState) -> Tensor:
        try:
            return step(model, tokens, batch, state)
        except AttnError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            require_states(model.state_specs(), state, error)
            raise

    return stepping


def require_states(specs: Mapping[str, StateSpecs], given: ModelState, error: Exception) -> None:
    """Raise `WrongState`, caused by the `error` of a step, where it was given other states than `specs` by layer."""
    for layer, needed in specs.items():
        fault = _fault(needed, given.get(layer, {}))
        if fault is not None:
            needs = f"layer {layer} needs {described(needed)}"
            raise WrongState(f"{needs}; {fault}: make the store from the model's state_specs", layer=layer) from error


def _fault(needed: StateSpecs, given: Mapping[str, Any]) -> str | None:
    """How the views of a layer differ from the specs of its states; None where no difference is found."""
    for name, spec in needed.items():
        if name not in given:
            return f"state {name!r} is missing, given: {', '.join(map(repr, given)) or 'no state'}"
        shapes = _given_shapes(given[name])
        if shapes is not None and shapes != _shapes(spec):
            return f"state {name!r} was given with {_text(shapes)}"
    return None


def _given_shapes(view: Any) -> dict[str, tuple[int, ...]] | None:
    """The row shape of each field of a view; None where the view has no readable rows now."""
    try:
        if hasattr(view, "read"):
            return {name: tuple(field.shape[1:]) for name, field in view.read().items()}
        return {name: tuple(field.shape[2:]) for name, field in view.rows([0]).fields.items()} or None
    except Exception:  # noqa: BLE001 -- nothing that goes wrong here may hide what went wrong before
        return None


def _shapes(spec: StateSpec) -> dict[str, tuple[int, ...]]:
    return {name: tuple(field.shape) for name, field in spec.fields.items()}


def _text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
