"""Models and texts from their publishers: a table of known sources, fetching, conversion.

folder = pull("smollm2-135m-instruct")
text = pull_shakespeare()
convert("model.gguf", "folder", "bfloat16")
"""

from attn_models.sources.convert import convert
from attn_models.sources.known import Archive, Source, known_sources, source_named
from attn_models.sources.progress import Report, Step, shown_progress, silent
from attn_models.sources.store import (
    LocalModel,
    ModelStore,
    is_complete,
    model_folder,
    pull,
    pull_repository,
    pull_shakespeare,
    pull_source,
    text_file,
)

__all__ = [
    "Archive",
    "LocalModel",
    "ModelStore",
    "Report",
    "Source",
    "Step",
    "convert",
    "is_complete",
    "known_sources",
    "model_folder",
    "pull",
    "pull_repository",
    "pull_shakespeare",
    "pull_source",
    "shown_progress",
    "silent",
    "source_named",
    "text_file",
]
