"""The model that guesses for a served one."""

from __future__ import annotations

from pathlib import Path

from attn_core import CacheFamily
from attn_engine import Draft, EngineLimits
from attn_models.loading import LoadedModel, load_draft

from attn_serve.memory import store_size
from attn_serve.requests import EngineSettings


def draft_of(folder: Path, served: LoadedModel, family: CacheFamily, settings: EngineSettings) -> Draft:
    """The model in `folder` with states of its own, in as much memory as those of the served model may take.

    Raises `Incompatible` for a model of other tokens.
    """
    model = load_draft(folder, served, settings.dtype, settings.weights)
    store = family.create(model.state_specs(), store_size(model, family, settings))
    return Draft(model, store, settings.max_batch_tokens or EngineLimits.step_tokens)
