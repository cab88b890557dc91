"""Convert a decoder to another mechanism that has weights in common with its own, such as Performer's (arXiv
2009.14794, section 4.3: a softmax model, trained a little further)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from attn_core.errors import Incompatible

from attn_models.decoder.decoder import Decoder


def other_mechanism(
    model: Decoder, mechanism: str, options: Mapping[str, Any], *, seed: int = 0
) -> tuple[Decoder, float]:
    """The decoder with this mechanism in every layer, and the energy kept.

    Weights that have the same name and shape in both are kept; the others are drawn from the seed. The energy is the
    share, 0 to 1, of the squared norm of the new weights of attention that was kept. Raises `Incompatible` if no weight
    of attention is kept, and the errors of a config with this mechanism, such as one that has no rotary positions.
    """
    config = dataclasses.replace(model.config, mechanism=mechanism, options=dict(options), pattern=())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        converted = Decoder(config).to(model.embedding.weight.dtype)
    old, norms = model.state_dict(), {True: 0.0, False: 0.0}
    kept = {name: old[name] for name, new in converted.state_dict().items() if _fits(old.get(name), new)}
    for name, new in converted.named_parameters():
        if ".attention." in name:
            norms[name in kept] += kept.get(name, new).double().square().sum().item()
    if not norms[True]:
        raise Incompatible(f"mechanism {mechanism!r} has no weights in common with {model.config.mechanism!r}")
    converted.load_state_dict(kept, strict=False)
    return converted.train(model.training), norms[True] / sum(norms.values())


def _fits(old: torch.Tensor | None, new: torch.Tensor) -> bool:
    return old is not None and old.shape == new.shape
