"""Mechanisms that break one law of ordinary use each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attn_core.auxiliary_loss import KeepsAuxiliaryLoss
from attn_core.inner import require_plain
from torch import Tensor

from broken.sound import Sound, SoundLayer


class KeepsGraphLayer(SoundLayer):
    """Keeps a loss of the last training pass, with its graph."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs."""
        out = super().forward(query, source, key_padding_mask=key_padding_mask)
        if self.training:
            self.loss = out.square().mean()
        return out


class KeepsGraph(Sound):
    """Breaks copied: tensors inside a graph cannot be copied."""

    layer = KeepsGraphLayer


class KeptLossLayer(KeepsAuxiliaryLoss, SoundLayer):
    """Keeps a loss of a training pass also when activation checkpointing computes the pass again."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs."""
        if self.training:
            self._auxiliary_loss = self.query(query).square().mean()
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class KeptLoss(Sound):
    """Breaks recomputation: a loss is left for the next update."""

    layer = KeptLossLayer


class SummedLossLayer(KeepsAuxiliaryLoss, SoundLayer):
    """Sums its loss over the sequences of a batch instead of averaging it."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs."""
        if self.training:
            self.keep_auxiliary_loss(self.query(query).square().sum())
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class SummedLoss(Sound):
    """Breaks micro batches: the loss grows with the batch."""

    layer = SummedLossLayer


class IgnoresLengthsLayer(SoundLayer):
    """Declares that it takes the lengths of documents, and computes all of them as one."""

    takes_lengths = True

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Outputs [batch, query, width] for whole sequences."""
        return super().forward(query, source, key_padding_mask=key_padding_mask)


class IgnoresLengths(Sound):
    """Breaks abilities: the declared lengths of documents are ignored."""

    layer = IgnoresLengthsLayer


CHUNK = 8


class InChunksLayer(SoundLayer):
    """Lets causal queries see the keys of their own chunk and of every second token, counted from the first row."""

    def _allowed(self, query: Tensor, key: Tensor) -> Tensor:
        allowed = super()._allowed(query, key)
        return allowed & ((key // CHUNK == query // CHUNK) | (key % 2 == 0)) if self.causal else allowed


class InChunks(Sound):
    """Breaks padding in front: chunks are counted from the first row, padding or not, which is not declared."""

    layer = InChunksLayer


class OnlyPlainLayer(SoundLayer):
    """Refuses every kernel, as it has a computation of its own."""

    def use_kernel(self, name: str | None) -> None:
        """Raise `Incompatible` for any name but "plain"."""
        require_plain(name, "it")


class OnlyPlain(Sound):
    """Keeps every law, including that of kernel names."""

    layer = OnlyPlainLayer


class AnyKernelLayer(SoundLayer):
    """Takes every name of a kernel, and uses none."""

    def use_kernel(self, name: str | None) -> None:
        """Keep the name."""
        self.kernel = name


class AnyKernel(Sound):
    """Breaks kernel names: the name is ignored."""

    layer = AnyKernelLayer


class FirstSequenceLayer(SoundLayer):
    """Looks at the first sequence of every batch."""

    def forward(self, query: Tensor, source: Tensor | None = None, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The sound outputs, sequence by sequence."""
        masks = [None] * len(query) if key_padding_mask is None else key_padding_mask[:, None]
        one_by_one, pairs = super().forward, zip(query[:, None], masks, strict=True)
        return torch.cat([one_by_one(one, source, key_padding_mask=mask) for one, mask in pairs])


class FirstSequence(Sound):
    """Breaks no sequences: nothing cannot be concatenated."""

    layer = FirstSequenceLayer


class OnTheHostLayer(SoundLayer):
    """Copies a number to the host that it does not need."""

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = super()._scores(query, key)
        return scores if torch.compiler.is_compiling() else scores * float(torch.ones((), device=scores.device))


class OnTheHost(Sound):
    """Breaks on meta: there is no number to copy."""

    layer = OnTheHostLayer
