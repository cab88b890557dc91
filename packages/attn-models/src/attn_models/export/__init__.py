"""Exports of models for other programs; imports torch."""

from attn_models.export.model import Exported, ExportFormat, export_model

__all__ = ["ExportFormat", "Exported", "export_model"]
