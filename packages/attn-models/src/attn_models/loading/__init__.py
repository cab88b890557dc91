"""Loads models from checkpoint folders and saves them: language models here, encoders and their heads in `encoders`."""

from attn_models.loading.models import LoadedModel, load_draft, load_model, save_model

__all__ = ["LoadedModel", "load_draft", "load_model", "save_model"]
