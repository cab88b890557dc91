"""A smaller model that is to guess for another."""

from __future__ import annotations

from pathlib import Path

from attn_core.errors import Incompatible
from attn_core.models import LanguageModel

from attn_models.loading import LoadedModel, load_model


def load_draft(folder: Path, served: LoadedModel, dtype: str = "float32", weights: str = "auto") -> LanguageModel:
    """The model in `folder`, loaded as `load_model` does, with the tokens of the model that it guesses for.

    Raises `Incompatible` for other tokens or a model that reads a source, and what loading it raises.
    """
    draft = load_model(folder, dtype, weights=weights)
    if draft.source_context is not None:
        raise Incompatible(f"draft {folder}: it reads a source; a draft is a decoder", field="draft")
    theirs, ours = draft.tokenizer, served.tokenizer
    if theirs is None or ours is None or draft.model.vocabulary != served.model.vocabulary:
        sizes = draft.model.vocabulary, served.model.vocabulary
        raise Incompatible(f"draft {folder}: it has {sizes[0]} tokens, the model {sizes[1]}", field="draft")
    for token in range(min(theirs.vocabulary, ours.vocabulary)):
        if theirs.token_bytes(token) != ours.token_bytes(token):
            raise Incompatible(f"draft {folder}: token {token} is another than the model's", field="draft")
    model: LanguageModel = draft.model
    return model
