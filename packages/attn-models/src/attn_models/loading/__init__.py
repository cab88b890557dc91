"""Models from checkpoint folders and back: language models here, encoders with or without a head in `encoders`."""

from attn_models.loading.models import LoadedModel, load_draft, load_model, save_model

__all__ = ["LoadedModel", "load_draft", "load_model", "save_model"]
