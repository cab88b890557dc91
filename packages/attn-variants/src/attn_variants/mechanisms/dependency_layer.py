"""The layer of attention to vectors by distance in a dependency tree, with one tree or one for each sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

from attn_core import AttentionInputs, AttentionSpec
from attn_core.errors import Incompatible
from attn_core.modifiers import DependencyKeys, DependencyValues
from torch import Tensor

from attn_variants.attention.layer import SpecLayer
from attn_variants.compute import plain
from attn_variants.compute.dependency import ParsedSentences
from attn_variants.compute.dropout import with_dropout
from attn_variants.compute.plain import attention_weights


class DependencyLayer(SpecLayer):
    """A `SpecLayer` that also accepts the dependency tree of each sentence in the call."""

    takes_parses = True

    def forward(
        self, query: Tensor, source: Tensor | None = None, *, parses: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Compute attention over whole sequences [batch, token, hidden_size] -> [batch, token, hidden_size].

        `parses` [batch, token], int64, has the token that each token of each sentence depends on, -1 for its root and
        for padding; without it, all sentences have the tree of the config. Raises `InvalidValue` for a cycle, several
        roots, or heads that are not tokens, and `Incompatible` for `lengths`, which would cut the trees.
        """
        if parses is None:
            return super().forward(query, source, **others)
        if others.pop("lengths", None) is not None:
            raise Incompatible("parses are of whole sequences: give documents as sequences, not by lengths")
        spec, operands = self._of_each(parses, query, source, **others)
        return self.output(plain.attend(spec, with_dropout(operands, self)).flatten(-2))  # type: ignore[no-any-return]

    def weights(
        self, query: Tensor, source: Tensor | None = None, *, parses: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Attention weights [batch, heads, query, key]; see `forward` for the arguments."""
        if parses is None:
            return super().weights(query, source, **others)
        return attention_weights(*self._of_each(parses, query, source, **others))

    def _of_each(
        self, parses: Tensor, rows: Tensor, source: Tensor | None, **others: Any
    ) -> tuple[AttentionSpec, AttentionInputs]:
        """The spec with the trees of the sentences, and the inputs of attention."""
        trees = ParsedSentences.of(parses, rows, others.get("key_padding_mask"))
        modifiers = tuple(
            dataclasses.replace(modifier, tree=trees)
            if isinstance(modifier, (DependencyKeys, DependencyValues))
            else modifier
            for modifier in self.spec.modifiers
        )
        given = others.get("key_padding_mask"), others.get("shared_kv")
        return dataclasses.replace(self.spec, modifiers=modifiers), self._operands(rows, source, *given)
