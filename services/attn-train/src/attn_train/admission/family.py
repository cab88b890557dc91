"""Checks of a model of another family than the decoder."""

from __future__ import annotations

from collections.abc import Mapping

from attn_core import installed
from attn_core.errors import InvalidValue, UnknownName, UserError

from attn_train.admission.shapes_only import shapes_only
from attn_train.data import IMAGES, PAIRS, TAGS, TEXT, subject_of
from attn_train.loop.pairs import VOCABULARY
from attn_train.spec import DataSpec, FamilyModelSpec

SAMPLE_TAGS = 17
"""Parts of speech that all languages share."""

WRITES = {TEXT, PAIRS}
"""Subjects of models that write tokens."""


def count_family_parameters(model: FamilyModelSpec, data: DataSpec) -> int:
    """Parameters of the model, built without memory, for a middling vocabulary where the data decide on one.

    Images are read to see how large they are. Raises `UnknownName` or `InvalidValue` with the field as on the wire.
    """
    families = {family.name: family for family in installed().models}
    if model.family not in families:
        raise UnknownName.of("family of models", model.family, families)
    decided = _decided(model, data)
    for field in decided:
        if field in model.fields:
            raise InvalidValue.of(f"spec.model.family_options.{field}", model.fields[field], "none: the data decide")
    family = families[model.family]
    try:
        config = family.configure(model.values(decided))
        with shapes_only():
            built = family.build(config)
    except UserError as error:
        named = error.metadata.get("field")
        error.metadata["field"] = f"spec.model.family_options.{named}" if named else "spec.model.family_options"
        raise
    if subject_of(model) in WRITES and not hasattr(built, "step"):
        raise InvalidValue.of("spec.model.family", model.family, "a family of models that write tokens, or empty")
    return sum(parameter.numel() for parameter in built.parameters())


def _decided(model: FamilyModelSpec, data: DataSpec) -> Mapping[str, int]:
    subject = subject_of(model)
    if subject == IMAGES:
        from attn_train.image_data import load_images

        return load_images(data).decided
    return {"vocabulary": VOCABULARY} | ({"classes": SAMPLE_TAGS} if subject == TAGS else {})
