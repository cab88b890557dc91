"""Decoders with several residual streams that every sublayer mixes, as DeepSeek-V4 and GLM-5.3 have them."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.checks import require_number, require_whole
from attn_core.errors import InvalidValue
from attn_schema.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class StreamConfig(DecoderConfig):
    """A decoder with `hc_mult` residual streams, whose mixing matrices are normalised `hc_sinkhorn_iters` times, with
    `hc_eps` added to sums.

    Both factors in feed-forwards are limited to `swiglu_limit`.
    """

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    swiglu_limit: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole("hc_mult", self.hc_mult, ge=1, unit="streams")
        require_whole("hc_sinkhorn_iters", self.hc_sinkhorn_iters, ge=1)
        require_number("hc_eps", self.hc_eps, ge=0)
        require_number("swiglu_limit", self.swiglu_limit, gt=0)
        if self.norm_place != "pre" or self.norm != "rms":
            raise InvalidValue.of("norm_place", f"{self.norm_place}, {self.norm}", "pre, with the norm rms")
        if self.num_nextn_predict_layers:
            raise InvalidValue.of("num_nextn_predict_layers", self.num_nextn_predict_layers, "0 with several streams")
