"""The sampling kernel: rows of logits are distributed to threads, and each is processed while it is in the cache."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from attn_core.errors import InvalidValue
from attn_core.kernels.base import Anything, AtMost, Condition
from attn_core.kernels.sampling import Draw, LogProbability, SamplingKernel, SamplingProblem

from attn_kernels_cpu.blocks import unloaded
from attn_kernels_cpu.compiling import why_not

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_VOCABULARY = 2**21
"""The largest vocabulary whose token weights are summed without rounding."""
ADDRESS = ctypes.c_void_p


class DrawStruct(ctypes.Structure):
    """The struct `Draw` of native/draw.hpp."""

    _fields_ = (
        ("occurred", ADDRESS),
        ("allowed", ADDRESS),
        ("counts", ADDRESS),
        ("bias", ADDRESS),
        ("biased", ADDRESS),
        ("point", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("inverse", ctypes.c_float),
        ("repetition", ctypes.c_float),
        ("frequency", ctypes.c_float),
        ("presence", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("biases", ctypes.c_int32),
        ("occurrences", ctypes.c_int32),
    )


class CpuSampling(SamplingKernel):
    """Sampling with penalties, temperature, top-k, top-p and min-p, and log probabilities."""

    name = "cpu_sampling"
    summary = "the next token of each row of logits, and log probabilities, in C++"

    accepts: ClassVar[Mapping[str, Condition]] = {
        "vocab_size": AtMost(LARGEST_VOCABULARY), "batch_invariant": Anything(),
    }  # fmt: skip

    def available(self) -> str | None:
        """Why the kernel cannot run here, or None.

        It uses the library that packed weights have loaded, and does not compile one itself.
        """
        return why_not() or unloaded()

    def cost(self, problem: SamplingProblem) -> float:  # noqa: ARG002 -- the same for every size
        """An estimate: the C++ kernel takes a fifth of the time of NumPy."""
        return 0.2

    def choose(self, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
        """See `SamplingKernel.choose`."""
        import torch

        from attn_kernels_cpu.library import library

        scores = logits.float().contiguous()
        tokens = torch.empty(len(draws), dtype=torch.int64)
        structs = (DrawStruct * len(draws))()
        held: list[Tensor] = []
        for struct, draw in zip(structs, draws, strict=True):
            held += _fill(struct, draw, scores.shape[-1])
        library().attn_draw(
            scores.data_ptr(), *scores.shape, ctypes.addressof(structs), tokens.data_ptr(), torch.get_num_threads()
        )
        found: list[int] = tokens.tolist()
        return found

    def log_probabilities(self, logits: Tensor, tokens: Sequence[int], top_logprobs: int) -> list[LogProbability]:
        """See `SamplingKernel.log_probabilities`."""
        import torch

        from attn_kernels_cpu.library import library

        scores = logits.float().contiguous()
        token_ids = torch.tensor(tokens, dtype=torch.int64)
        rows, size = scores.shape
        top = min(top_logprobs, size)
        own, values = torch.empty(rows), torch.empty(rows, top)
        ids = torch.empty(rows, top, dtype=torch.int64)
        library().attn_logprobs(
            scores.data_ptr(), rows, size, token_ids.data_ptr(), top,
            own.data_ptr(), ids.data_ptr(), values.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        pairs = [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
        return list(zip(own.tolist(), pairs, strict=True))


def _fill(struct: DrawStruct, draw: Draw, size: int) -> list[Tensor]:
    """Write a draw over `size` tokens into its struct, and return the tensors that the struct points to."""
    struct.inverse, struct.point = draw.inverse_temperature, draw.point
    struct.top_k, struct.top_p, struct.min_p = min(draw.top_k, size), draw.top_p, draw.min_p
    struct.repetition, struct.frequency = draw.repetition_penalty, draw.frequency_penalty
    struct.presence = draw.presence_penalty
    held: list[Tensor] = []
    if draw.token_counts is not None:
        (struct.occurred, struct.occurrences) = draw.token_counts.ids.buffer_info()
        struct.counts, _ = draw.token_counts.counts.buffer_info()
    if draw.allowed is not None:
        held = [draw.allowed.contiguous()]
        struct.allowed = held[0].data_ptr()
    if draw.logit_bias:
        import torch

        if not all(0 <= token < size for token in draw.logit_bias):
            raise InvalidValue.of("logit_bias", sorted(draw.logit_bias), f"tokens from 0 to {size - 1}")
        ids = torch.tensor(list(draw.logit_bias), dtype=torch.int64)
        bias = torch.tensor(list(draw.logit_bias.values()), dtype=torch.float32)
        struct.biased, struct.bias, struct.biases = ids.data_ptr(), bias.data_ptr(), len(ids)
        held += [ids, bias]
    return held
