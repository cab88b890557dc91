"""The law of the equation: where it is one that the kit can read, attention weights are what it says."""

from __future__ import annotations

import re
from typing import ClassVar

import torch
from attn_core import Capability
from attn_core.declared import DeclaredMechanism
from torch import Tensor, nn

from attn_testing.law import MechanismLaw, require_same
from attn_testing.subject import Case

ENERGIES = {
    r"q^\topk/\sqrt{d_k}": True,
    r"QK^\top/\sqrt{d_k}": True,
    r"\frac{QK^\top}{\sqrt{d_k}}": True,
    r"QK^\top": False,
    r"q^\topk": False,
}
"""Spellings of the product of queries and keys, without spaces and indices of heads, and whether they are scaled."""

SOFTMAX = re.compile(r"(?:[A-Za-z]+=|\\mathrm\{head\}=)?\\mathrm\{softmax\}\((?P<energy>.+?)(?:\+M)?\)V")


def scaled(equation: str) -> bool | None:
    """Whether the equation is a softmax of products divided by the root of the key size (True), of products alone
    (False), or neither (None)."""
    first = re.sub(r"\\left|\\right|\s|_h|_\{g\(h\)\}", "", equation.split(r",\quad", maxsplit=1)[0])
    found = SOFTMAX.fullmatch(first)
    return ENERGIES.get(found["energy"]) if found else None


class Equation(MechanismLaw):
    """Weights are those of the declared equation, where this is a softmax of products of projected rows.

    It applies to layers that have these projections as linear modules `query` and `key`, without rotary positions.
    """

    needs: ClassVar[tuple[Capability, ...]] = (Capability.WEIGHTS,)
    cases_at_most = 4

    @classmethod
    def silent_on(cls, case: Case) -> str | None:
        if scaled(case.mechanism.equation) is None:
            return "its equation is not of the forms softmax(Q Kᵀ / √d + M) V and softmax(Q Kᵀ + M) V"
        if case.config.rotary is not None:
            return "rotary positions are not part of the equation"
        layer = case.layer if case.refusal is None else None
        linear = all(isinstance(getattr(layer, name, None), nn.Linear) for name in ("query", "key"))
        return None if linear else "its layer has no linear modules query and key"

    def test_weights_are_those_of_the_equation(self, case: Case) -> None:
        rows, source = case.rows(2, 9), case.source(2, 7)
        with torch.no_grad():
            found = case.weights(rows, source)
            energies = products(case, rows, rows if source is None else source, found.shape[1])
        if scaled(case.mechanism.equation):
            energies = energies / case.config.head_layout.key_size**0.5
        expected = torch.softmax(energies.masked_fill(found == 0, -torch.inf), -1).nan_to_num(0.0)
        require_same(found, expected, f"weights, and those of the equation {case.mechanism.equation!r},", 1e-9)


def products(case: Case, rows: Tensor, memory: Tensor, heads: int) -> Tensor:
    """The products [batch, heads, query, key] of projected rows; each head reads the keys of its group."""
    layer, mechanism = case.layer, case.mechanism
    size = layer.query(rows).shape[-1] // heads
    query, key = (module.unflatten(-1, (-1, size)).transpose(1, 2) for module in (layer.query(rows), layer.key(memory)))
    declared = mechanism.spec(case.config).heads.groups if isinstance(mechanism, DeclaredMechanism) else None
    groups = declared or [head * key.shape[1] // heads for head in range(heads)]
    energies: Tensor = query @ key[:, list(groups)].transpose(-1, -2)
    return energies
