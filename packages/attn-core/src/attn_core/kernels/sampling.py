"""Choosing the next token of each row of logits, and log probabilities: what their kernels are asked.

A token is drawn with whole numbers, so that its choice does not depend on who computes it, nor in which order: with the
highest score h, a token of score s weighs round(2^32 · e^((s - h) · inverse_temperature)), where e^x is a polynomial in
float32 without fused operations, and of up to 2^21 such weights every sum in float64 is exact. `attn_engine.sampler` is
the definition, in NumPy; a kernel gives the same tokens. One that weighs less than half of one, e^-22.9 times what the
likeliest does, is never drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import KernelTable
from attn_core.plugins.catalog import installed

if TYPE_CHECKING:
    from torch import Tensor

LogProbability = tuple[float, list[tuple[int, float]]]
"""The log probability of a token, and the most likely (id, log probability) at its place; in nats."""


class TokenCounts:
    """The distinct tokens of a growing sequence and how often each was generated, which is all that penalties read.

    `ids`, int64, are in the order of their first occurrence; `counts`, float32, are 0 for tokens of the prompt alone.
    Both are arrays of a buffer whose size is the number of distinct tokens, not that of the vocabulary.
    """

    def __init__(self, prompt: Iterable[int] = (), generated: Iterable[int] = ()) -> None:
        self.ids = array("q", dict.fromkeys(prompt))
        self.counts = array("f", bytes(4 * len(self.ids)))
        self._index = {token: index for index, token in enumerate(self.ids)}
        self.extend(generated)

    def extend(self, generated: Iterable[int]) -> None:
        """Count more generated tokens."""
        for token in generated:
            index = self._index.setdefault(token, len(self.ids))
            if index == len(self.ids):
                self.ids.append(token)
                self.counts.append(0.0)
            self.counts[index] += 1


class Draw(NamedTuple):
    """How the token of one row is chosen.

    `repetition_penalty` changes all tokens of `token_counts`, the two other penalties those that were generated.
    `allowed` [vocab_size], bool, are the tokens that may come next, None for all. `logit_bias` is by token id. An
    `inverse_temperature` of 0 takes the most likely token. `point`, in [0, 1), is the place in the cumulative
    distribution: by token id, or, with `top_k` (0 for all) or `top_p` below 1, by rank.
    """

    inverse_temperature: float
    point: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    token_counts: TokenCounts | None
    allowed: Tensor | None


@dataclass(frozen=True, kw_only=True)
class SamplingProblem(Problem):
    """Tokens of rows of logits over `vocab_size` tokens, in their type."""

    operation: ClassVar[str] = "sampling"

    vocab_size: int = 0


class SamplingKernel(Kernel[SamplingProblem]):
    """Chooses tokens of rows, each by itself."""

    problem: ClassVar[type[Problem]] = SamplingProblem

    @abstractmethod
    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """A token for each row of logits [rows, vocab_size]; -1 where the scores of a row are no finite numbers."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor, tokens: Sequence[int], top_logprobs: int) -> list[LogProbability]:
        """Of each row of finite logits [rows, vocab_size] that of its token, and so many of the most likely."""


def sampling_kernel(vocab_size: int, device: str) -> SamplingKernel | None:
    """The kernel for float32 logits on this type of device; None where the caller's definition computes."""
    found: KernelTable[Any] = KernelTable(installed().kernels, SamplingKernel, partial(_problem, device))
    return found.find(vocab_size)


def _problem(device: str, vocab_size: int) -> SamplingProblem:
    return SamplingProblem(vocab_size=vocab_size, device=device)
