"""Mechanisms of the delta rule: DeltaNet and Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attn_core import MechanismConfig, Paper
from attn_core.checks import checked, require_number, require_whole
from attn_core.errors import InvalidValue
from attn_core.kernels.recurrent_step import RecurrentStepSpec
from attn_core.splitting import option_of_rank

from attn_variants.mechanisms.decode_steps import delta_step, kimi_delta_step
from attn_variants.mechanisms.recurrences import ConvolvedConfig, Extra, Recurrence, Update


class DeltaNet(Recurrence):
    """The delta rule: a key replaces the value that the state holds for it, instead of adding to it.

    Queries, keys and values pass a short convolution and SiLU; queries and keys are L2-normalised. With strength β = 1
    a key overwrites its value, with 0 it writes nothing.
    """

    name = "deltanet"
    summary = "linear attention with the delta rule: a value replaces what the state held for its key"
    paper = Paper(
        title="Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
        authors="Yang et al.",
        year=2024,
        arxiv="2406.06484",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top,\quad o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},"
        r"\quad \beta_t = \sigma(w_\beta^\top x_t),\quad y_t = W_O\,\mathrm{norm}(o_t)"
    )
    update = Update(delta_rule=True)

    @dataclass(frozen=True, kw_only=True)
    class Config(ConvolvedConfig):
        """`norm_eps` is that of the norm of outputs."""

        norm_eps: float = checked(1e-5, require_number, gt=0)

    def build(self, config: MechanismConfig) -> Any:
        """A new `DeltaLayer`; raises the errors of `heads`."""
        from attn_variants.mechanisms.delta_layers import DeltaLayer

        own = self.Config.of(config)
        shared: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "bias": config.bias,
            "chunk": own.chunk,
            "taps": own.convolution,
        }
        return DeltaLayer(self.heads(config), **shared, eps=own.norm_eps)

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `DeltaLayer`."""
        return delta_step(self.heads(config), self.taps(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The parameters of the strengths, one per head, and of the norm."""
        return Extra(linear=config.hidden_size * config.num_heads, other=self.heads(config).value_size)


class KimiDeltaAttention(Recurrence):
    """The delta rule on a state whose channels decay at rates computed from each token.

    Queries, keys and values pass a short convolution and SiLU; queries and keys are L2-normalised.
    """

    name = "kda"
    summary = "the delta rule with a data-dependent decay for each key channel"
    used_by = ("Kimi Linear",)
    paper = Paper(
        title="Kimi Linear: An Expressive, Efficient Attention Architecture",
        authors="Kimi Team",
        year=2025,
        arxiv="2510.26692",
    )
    equation = (
        r"S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{diag}(\alpha_t) S_{t-1} + \beta_t k_t v_t^\top,\quad"
        r" o_t = \frac{S_t^\top q_t}{\sqrt{d_k}},\quad"
        r" \alpha_t = \exp\left(-e^{a_h}\,\mathrm{softplus}(W_2 W_1 x_t + b)\right),\quad"
        r" y_t = W_O\left(\sigma(W_4 W_3 x_t) \odot \mathrm{norm}(o_t)\right)"
    )
    update = Update(decay="channel", delta_rule=True)

    @dataclass(frozen=True, kw_only=True)
    class Config(DeltaNet.Config):
        """`rank` is that of the decay gate and of the output gate: by default the value size of a head, 0 for full
        matrices (Ling 3). `gate_bias` adds a bias to the output gate, as in the authors' library.

        `key_heads`, by default the number of heads, is the number of queries and keys of a token: neighbouring heads,
        each with its own values, decays, strengths and memory, share them.

        With `lower_bound` b < 0 the log decay is b σ(e^a (W x + b')) instead of -e^a softplus(W x + b'), so that it
        stays above b (Ling 3 and GLM-5.3, -5).
        """

        key_heads: int | None = checked(None, require_whole, ge=1, optional=True)
        rank: int | None = checked(None, require_whole, ge=0, unit="units", optional=True)
        gate_bias: bool = False
        lower_bound: float | None = checked(None, require_number, lt=0, optional=True)

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.num_heads % (self.key_heads or self.num_heads):
                raise InvalidValue.of("key_heads", self.key_heads, f"a divisor of the {self.num_heads} heads")

    def build(self, config: MechanismConfig) -> Any:
        """A new `KimiDeltaLayer`; raises the errors of `heads`."""
        from attn_variants.mechanisms.delta_layers import KimiDeltaLayer, KimiGates

        own = self.Config.of(config)
        shared: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "bias": config.bias,
            "chunk": own.chunk,
            "taps": own.convolution,
        }
        gates = KimiGates(self.rank(config), own.gate_bias, own.lower_bound)
        return KimiDeltaLayer(self.heads(config), **shared, eps=own.norm_eps, gates=gates)

    def split_options(self, config: MechanismConfig, ranks: int) -> Mapping[str, Any]:
        """The option `key_heads` for a rank; raises `InvalidValue` if the ranks do not divide it."""
        return option_of_rank(self, "key_heads", self.Config.of(config).key_heads, ranks)

    def rank(self, config: MechanismConfig) -> int:
        """The rank of the decay gate and of the output gate; 0 for full matrices."""
        given = self.Config.of(config).rank
        return self.heads(config).value_size if given is None else given

    def recurrent_step(self, config: MechanismConfig) -> RecurrentStepSpec | None:
        """The decode step of `KimiDeltaLayer`; None with a `lower_bound`, which no kernel computes."""
        bounded = self.Config.of(config).lower_bound is not None
        return None if bounded else kimi_delta_step(self.heads(config), self.taps(config))

    def extras(self, config: MechanismConfig) -> Extra:
        """The parameters of the strengths, the two gates, the rates and biases of the decay, and the norm."""
        heads, rank, width = self.heads(config), self.rank(config), config.hidden_size
        into, out = heads.query * heads.key_size, heads.query * heads.value_size
        gates = rank * (2 * width + into + out) if rank else width * (into + out)
        bias = out if self.Config.of(config).gate_bias else 0
        return Extra(linear=gates + width * heads.query, other=heads.query + into + heads.value_size + bias)
