"""The states of a model whose token rows are kept in codes: each field that is coded becomes its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attn_core import Field, Paged
from attn_core.stores import ModelSpecs

from attn_cache.quantised.grouping import Grouping, coded


def coded_specs(specs: ModelSpecs, grouping: Grouping) -> ModelSpecs:
    """`specs` as a store of plain rows is to hold them; states without a row per token stay as they are."""
    return {
        layer: {
            state: dataclasses.replace(spec, fields=coded_fields(spec.fields, grouping))
            if isinstance(spec, Paged)
            else spec
            for state, spec in states.items()
        }
        for layer, states in specs.items()
    }


def coded_fields(fields: Mapping[str, Field], grouping: Grouping) -> dict[str, Field]:
    """The parts of each field by `part_name`, or the field itself where it is not coded."""
    found: dict[str, Field] = {}
    for name, field in fields.items():
        if coded(field):
            found |= {part_name(name, part): row for part, row in grouping.parts(field.shape).items()}
        else:
            found[name] = field
    return found


def part_name(field: str, part: str) -> str:
    """The name of a part of a field among the fields of a coded state."""
    return f"{field}.{part}"
