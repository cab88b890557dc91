"""What is wrong with the states that a step was given: found after it failed, so that other steps pay nothing.

A store is made from the `state_specs` of a model. One that was made by hand, or for another model, gives other names,
fields or shapes; the error that follows deep in a layer, such as `KeyError: 'inputs'`, does not say so.
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
    """The states of a layer by kind, name and shape of a row, such as "Paged 'kv' (key [2, 4], value [2, 4])"."""
    return ", ".join(f"{type(spec).__name__} {name!r} ({_rows(_shapes(spec))})" for name, spec in specs.items()) or (
        "nothing"
    )


def names_wrong_states(step: ModelStep) -> ModelStep:
    """The `step` of a model, whose failures over states that are not the model's say which these are."""

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
    """Raise `WrongState`, from what a step raised, where it was given other states than these, by layer name."""
    for layer, needed in specs.items():
        fault = _fault(needed, given.get(layer, {}))
        if fault is not None:
            needs = f"layer {layer} needs {described(needed)}"
            raise WrongState(f"{needs}; {fault}: make the store from the model's state_specs", layer=layer) from error


def _fault(needed: StateSpecs, given: Mapping[str, Any]) -> str | None:
    """What of the views of a layer is not as its states say; None where nothing is seen to be wrong."""
    for name, spec in needed.items():
        if name not in given:
            return f"state {name!r} is missing, given: {', '.join(map(repr, given)) or 'no state'}"
        shapes = _given_shapes(given[name])
        if shapes is not None and shapes != _shapes(spec):
            return f"state {name!r} was given with {_rows(shapes)}"
    return None


def _given_shapes(view: Any) -> dict[str, tuple[int, ...]] | None:
    """The shape of a row of each field that a view shows; None where it shows none now."""
    try:
        if hasattr(view, "read"):
            return {name: tuple(field.shape[1:]) for name, field in view.read().items()}
        return {name: tuple(field.shape[2:]) for name, field in view.rows([0]).fields.items()} or None
    except Exception:  # noqa: BLE001 -- nothing that goes wrong here may hide what went wrong before
        return None


def _shapes(spec: StateSpec) -> dict[str, tuple[int, ...]]:
    return {name: tuple(field.shape) for name, field in spec.fields.items()}


def _rows(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
