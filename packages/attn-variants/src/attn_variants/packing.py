"""A spec layer over texts packed end to end, so that nothing is computed for padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attn_core.errors import InvalidValue
from attn_core.kernels.attend import Varlen
from torch import Tensor

from attn_variants.compute.rotary import CosSin, cos_sin_to
from attn_variants.dropping import dropping

if TYPE_CHECKING:
    from attn_variants.spec_layer import SpecLayer


def forward_packed(layer: SpecLayer, rows: Tensor, lengths: Sequence[int], more: Mapping[str, object | None]) -> Tensor:
    """Attend over texts of these lengths in rows [batch, sum of lengths, width], each alone, from position 0 on.

    A layer that computes more than its spec takes the texts one by one. Raises `InvalidValue` for lengths that are not
    all rows, and for `more`, other arguments of a layer by name, which packed texts have no use for.
    """
    given = sorted(name for name, value in more.items() if value is not None)
    if given or layer.spec.cross:
        raise InvalidValue.of("lengths", f"beside {', '.join(given) or 'a source'}", "texts that attend to themselves")
    varlen = Varlen.of(lengths)
    if sum(varlen.keys) != rows.shape[-2]:
        raise InvalidValue.of("lengths", sum(varlen.keys), f"{rows.shape[-2]} in all, as there are rows")
    spans = [span for span, _ in varlen.spans()]
    if not joint(layer):
        return torch.cat([rows[..., :0, :], *(layer(rows[..., span, :]) for span in spans)], dim=-2)
    query, key, value = layer.project(rows, cos_sin_of_documents(layer, rows, varlen))
    operands = dataclasses.replace(layer.operands(query, {"key": key, "value": value}), varlen=varlen)
    out: Tensor = layer.output(layer.attend(rows, dropping(operands, layer)).flatten(-2))
    return out


def joint(layer: SpecLayer) -> bool:
    """Whether all that the layer computes is projections and its spec."""
    from attn_variants.spec_layer import SpecLayer

    return type(layer) is SpecLayer and layer.inner is None and not layer.borrows


def cos_sin_of_documents(layer: SpecLayer, rows: Tensor, varlen: Varlen) -> CosSin | None:
    """The turns of positions that start anew in each text; None where positions turn nothing."""
    if layer.spec.rotary is None:
        return None
    places = torch.tensor([place for length in varlen.keys for place in range(length)], device=rows.device)
    return cos_sin_to(layer.spec.rotary, layer.rotated, max(varlen.keys, default=1), rows).at(places.long())
