"""Convert a decoder to make keys and values from one latent (TransMLA, arXiv 2502.07864)."""

from __future__ import annotations

import dataclasses

import torch
from attn_core import AttentionSpec, Causal, Heads
from attn_core.errors import Incompatible, InvalidValue
from attn_schema.decoder import DecoderConfig
from torch import Tensor

from attn_models.conversion.heads import PROJECTIONS, by_head, specs_of
from attn_models.decoder.decoder import Decoder

MECHANISM = "attn-variants/transmla"


def latent_attention(model: Decoder, latent: int | None = None) -> tuple[Decoder, float]:
    """The decoder whose layers cache `latent` elements per token, and the energy kept.

    The weights of keys and values, stacked, are factorised by singular value decomposition, of which the largest
    `latent` singular values are kept, by default all, which changes nothing. The energy is the share, 0 to 1, of the
    sum of squared singular values that is kept. Raises `Incompatible` for layers that are not plain causal softmax
    attention, `InvalidValue` for a latent above the full rank.
    """
    heads = _heads(model.config)
    full = min(heads.key_value * (heads.key_size + heads.value_size), model.config.hidden_size)
    size = full if latent is None else latent
    if size not in range(1, full + 1):
        raise InvalidValue.of("latent", latent, f"a whole number from 1 to {full}, the full rank")
    tensors, energy, kept = {}, 0.0, 0.0
    source = model.state_dict()
    for name, tensor in source.items():
        before, _, leaf = name.partition(".attention.")
        prefix = f"{before}.attention."
        if leaf == "key.weight":
            parts = factorised(tensor, source[f"{prefix}value.weight"], size)
            tensors[f"{prefix}down.weight"] = parts.down.to(tensor.dtype)
            tensors[f"{prefix}key.weight"] = _repeated(parts.key, heads).to(tensor.dtype)
            tensors[f"{prefix}value.weight"] = _repeated(parts.value, heads).to(tensor.dtype)
            energy, kept = energy + parts.energy, kept + parts.kept
        elif leaf in PROJECTIONS and leaf.endswith("bias"):
            tensors[name] = _repeated(tensor, heads)
        elif leaf not in PROJECTIONS:
            tensors[name] = tensor
    config = dataclasses.replace(
        model.config,
        num_kv_heads=None,
        head_dim=heads.key_size,
        mechanism=MECHANISM,
        options={"latent": size},
        pattern=(),
    )
    converted = Decoder(config).to(model.embedding.weight.dtype)
    converted.load_state_dict(tensors)
    return converted.train(model.training), kept / energy


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """The factors `key` and `value` [rows, latent] and `down` [latent, width], in float64.

    `energy` is the sum of all squared singular values, `kept` that of the kept ones.
    """

    key: Tensor
    value: Tensor
    down: Tensor
    energy: float
    kept: float


def factorised(key: Tensor, value: Tensor, latent: int) -> Factors:
    """The best approximation of rank `latent` (Eckart and Young) of key and value weights [rows, width].

    Each factor takes the square roots of the singular values, so that both have similar magnitudes.
    """
    left, values, right = torch.linalg.svd(torch.cat([key, value]).double(), full_matrices=False)
    root = values[:latent].sqrt()
    up = left[:, :latent] * root
    energies = values.square()
    return Factors(
        key=up[: key.shape[0]],
        value=up[key.shape[0] :],
        down=root[:, None] * right[:latent],
        energy=energies.sum().item(),
        kept=energies[:latent].sum().item(),
    )


def _repeated(rows: Tensor, heads: Heads) -> Tensor:
    """Repeat rows [key_value_heads · size, ...] for each query head, giving [heads · size, ...]."""
    return by_head(rows, heads.key_value)[list(heads.group_of)].flatten(0, 1)


def _heads(config: DecoderConfig) -> Heads:
    found = set()
    for spec in specs_of(config):
        if spec != AttentionSpec(heads=spec.heads, mask=Causal(), rotary=config.rotary):
            raise Incompatible("only plain causal softmax attention can be factorised through a latent")
        found.add(spec.heads)
    if len(found) > 1:
        raise Incompatible(f"the layers have {len(found)} layouts of heads; only models with one can be converted")
    return found.pop()
