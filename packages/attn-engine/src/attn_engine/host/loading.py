"""Helpers of hosts for loading: finding the model folder, its quantization, choosing kernels, and the draft model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from attn_core.errors import CheckpointInvalid, Incompatible, InvalidValue
from attn_core.models import LanguageModel
from attn_models.loading import LoadedModel, load_draft
from attn_models.tokenizers.settings import GENERATION_NAME
from attn_schema import EngineConfig, SamplingParams


def quantization_of(model: Any) -> str:
    """The quantization of the weights of a model's linear layers; "none" if they are stored as loaded."""
    return getattr(model, "quantization", None) or "none"


def use_kernel(model: Any, name: str | None, numerics: AbstractContextManager[object] | None = None) -> None:
    """Compute all attention with the kernel called `name`; None lets the dispatcher choose. `numerics` is the context
    in which the model will be computed, if there is one.

    Then runs the model over one token, with an encoder input of maximum length if it takes one, so that errors are
    raised here and not in the first request: `KernelRefused` by a kernel that does not support the model, and
    `Incompatible` for a device that lacks an operation.
    """
    if name is not None:
        choosers = [getattr(module, "use_kernel", None) for module in model.modules()]
        chosen = [choose for choose in choosers if choose is not None]
        if not chosen:
            raise Incompatible("no attention layer of this model is computed by a kernel", kernel=name)
        for choose in chosen:
            choose(name)
        if hasattr(model, "take_apart"):
            model.take_apart()  # fused kernels of whole blocks would bypass the chosen attention kernel
    device = next(model.parameters()).device
    # Of maximum length, as encoders of images take exactly that many tokens.
    longest = getattr(model, "max_encoder_len", None)
    try:
        with torch.inference_mode(), numerics or nullcontext():
            one = torch.zeros(1, 1, dtype=torch.int64, device=device)
            model(one) if longest is None else model(one, one.expand(1, longest))
    except (NotImplementedError, TypeError) as error:
        # MPS raises a TypeError for float64, which it does not support.
        if isinstance(error, TypeError) and "MPS" not in str(error):
            raise
        detail = " ".join(str(error).split())[:200]
        message = f"{device} lacks an operation that this model needs; use device cpu: {detail}"
        raise Incompatible(message, field="device", device=device) from error


def recommended_sampling(loaded: LoadedModel) -> dict[str, float]:
    """What the folder's generation_config.json recommends; raises `CheckpointInvalid` for bad values."""
    try:
        return SamplingParams.recommended(loaded.generation)
    except InvalidValue as error:
        raise CheckpointInvalid.of(GENERATION_NAME, error.message) from error


def load_draft_model(served: LoadedModel, config: EngineConfig) -> LanguageModel | None:
    """Load the draft model of the config, if it has one; raises `Incompatible` for a model of another vocabulary."""
    if config.draft_model is None:
        return None
    return load_draft(Path(config.draft_model), served, config.dtype, config.quantization)
