"""Hosts a loaded model with its engine or encoder in process, with an API in the types of attn-schema; no network."""

from attn_engine.host.host import Deliver, EmbedTask, ModelHost, TextTask
from attn_engine.host.loading import find_folder
from attn_engine.host.opening import open_host
from attn_engine.host.preparation import Preparation
from attn_engine.host.tokenization import PromptTokenizer

__all__ = [
    "Deliver",
    "EmbedTask",
    "ModelHost",
    "Preparation",
    "PromptTokenizer",
    "TextTask",
    "find_folder",
    "open_host",
]
