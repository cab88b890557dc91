"""Checks of a model of another family than the decoder."""

from __future__ import annotations

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName, UserError

from attn_train.admission.shapes_only import shapes_only
from attn_train.loop.pairs import VOCABULARY
from attn_train.spec import FamilyModelSpec

OWN = ("vocabulary",)
"""Fields of a family that the data decide on."""


def count_family_parameters(model: FamilyModelSpec) -> int:
    """Parameters of the model for a middling vocabulary, built without memory.

    Raises `UnknownName` or `InvalidValue` with the field as on the wire.
    """
    families = {family.name: family for family in installed().models}
    if model.family not in families:
        raise UnknownName.of("family of models", model.family, families)
    for field in OWN:
        if field in model.fields:
            raise InvalidValue.of(f"spec.model.family_options.{field}", model.fields[field], "none: the data decide")
    family = families[model.family]
    try:
        config = family.configure(model.values(VOCABULARY))
        with shapes_only():
            built = family.build(config)
    except UserError as error:
        named = error.metadata.get("field")
        error.metadata["field"] = f"spec.model.family_options.{named}" if named else "spec.model.family_options"
        raise
    if not hasattr(built, "step"):
        raise InvalidValue.of("spec.model.family", model.family, "a family of models that write tokens, or empty")
    return sum(parameter.numel() for parameter in built.parameters())
