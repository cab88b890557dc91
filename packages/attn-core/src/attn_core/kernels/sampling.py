"""Sampling the next token of each row of logits, and log probabilities: problem, inputs and kernels.

Tokens are drawn with integer weights, so that the result does not depend on the implementation nor on the order of
summation: with the highest score h, a token of score s has the weight round(2^32 · e^((s - h) · inverse_temperature)),
where e^x is a polynomial in float32 without fused operations; sums of up to 2^21 such weights are exact in float64.
All kernels return the same tokens. A token whose weight is below one half before rounding, e^-22.9 times that of the
most likely token, is never drawn.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from attn_core.kernels.base import Kernel, Problem
from attn_core.kernels.dispatch import Operation
from attn_core.plugins.catalog import installed

if TYPE_CHECKING:
    from torch import Tensor

LogProbability = tuple[float, list[tuple[int, float]]]
"""The log probability of a token, and (id, log probability) of the most likely tokens at its position; in nats."""


class TokenCounts:
    """The distinct tokens of a growing sequence, and how often each was generated: the input of penalties.

    `ids`, int64, are in the order of first occurrence. `counts`, float32, are 0 for tokens that only the prompt has.
    Both are as long as there are distinct tokens, not as the vocabulary, and expose their buffers to native kernels.
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
    """The parameters by which the token of one row is drawn.

    An `inverse_temperature` of 0 takes the most likely token. `point`, in [0, 1), is the point of the cumulative
    distribution that is drawn: by token id, or, with `top_k` (0 for all) or `top_p` below 1, by rank. `logit_bias` is
    by token id. `repetition_penalty` applies to all tokens of `token_counts`, the two other penalties to those that
    were generated. `allowed` [vocab_size], bool, are the tokens that may be drawn; None for all.
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
    """Choosing tokens from rows of logits of the type `dtype` over `vocab_size` tokens."""

    operation: ClassVar[str] = "sampling"

    vocab_size: int = 0


class SamplingKernel(Kernel[SamplingProblem]):
    """Chooses a token for each row of logits, independently of other rows."""

    problem: ClassVar[type[Problem]] = SamplingProblem

    @abstractmethod
    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """A token for each row of logits [rows, vocab_size]; -1 for a row whose scores are not finite numbers."""

    @abstractmethod
    def log_probabilities(self, logits: Tensor, tokens: Sequence[int], top_logprobs: int) -> list[LogProbability]:
        """For each row of finite logits [rows, vocab_size]: that of its token, and of the `top_logprobs` likeliest."""


def sampling_kernel(vocab_size: int, device: str) -> SamplingKernel | None:
    """The kernel for float32 logits on this type of device; None if torch is to draw."""
    operation: Operation[Any] = Operation(installed().kernels, SamplingKernel)
    return operation.find(vocab_size=vocab_size, device=device)
