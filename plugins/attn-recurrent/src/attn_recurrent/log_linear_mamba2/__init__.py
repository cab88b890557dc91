"""Log-linear Mamba-2: a memory for each power of two of the past."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attn_core import Cost, Mechanism, MechanismConfig, Paper, Shape, Step, hookimpl

from attn_recurrent.log_linear_mamba2.config import LogLinearConfig
from attn_recurrent.mamba2 import Mamba2

if TYPE_CHECKING:
    from attn_recurrent.log_linear_mamba2.layer import LogLinearMamba2Layer


class LogLinearMamba2(Mamba2):
    """Mamba-2 with a memory for each bucket of a Fenwick tree over the past, each read with a weight of its own.

    Near tokens are in small buckets and distant ones in large; weights depend on the token that reads.
    """

    name = "log_linear_mamba2"
    counts_from_start = True  # positions say which tokens are in one bucket
    summary = "Mamba-2 with a memory for each power of two of the past, weighted by the token that reads"
    used_by = ()
    paper = Paper(title="Log-Linear Attention", authors="Guo et al.", year=2025, arxiv="2506.04761")
    equation = (
        r"o_t = \sum_{l=0}^{L-1} \lambda_{t,l} S_{t,l}^\top C_t + D_h x_t,\quad"
        r" S_{t,l} = \sum_{j \in \mathcal{B}_{t,l}} e^{-a_h (\Delta_{j+1} + \dots + \Delta_t)}"
        r" \Delta_j B_j x_j^\top,\quad"
        r" \lambda_{t,l} = \mathrm{softplus}(m_{h,l} w_{h,l}^\top u_t)"
    )
    Config = LogLinearConfig

    def build(self, config: MechanismConfig) -> LogLinearMamba2Layer:
        """A new `LogLinearMamba2Layer`."""
        from attn_recurrent.log_linear_mamba2.layer import LogLinearMamba2Layer

        return LogLinearMamba2Layer(LogLinearConfig.of(config))

    def cost(self, config: MechanismConfig, shape: Shape | Step) -> Cost:
        """The cost of `mamba2`, with a read and a write of every bucket for each token, and carries between chunks.

        Of these only the reads are allowed ones: a token is written to one bucket, and buckets become one by sums.
        """
        own, usual = LogLinearConfig.of(config), super().cost(config, shape)
        matrix, chunks = own.inner * own.state_size, -(-shape.query // own.chunk)
        reads = 2 * matrix * shape.batch * shape.query * (own.buckets - 1)
        carries = 2 * matrix * shape.batch * chunks * own.buckets**2
        return usual + Cost(flops=2 * reads + carries, allowed_flops=reads, parameters=own.further)


@hookimpl
def attn_mechanisms() -> list[Mechanism]:
    """The mechanisms of this plugin."""
    return [LogLinearMamba2()]
