"""Tokenizers: text to token ids and back, with vocabularies from checkpoint folders, GGUF files or training texts."""

from attn_models.tokenizers.gguf import tokenizer_from_gguf
from attn_models.tokenizers.learned import character_tokenizer
from attn_models.tokenizers.settings import TokenizerSettings
from attn_models.tokenizers.tokenizer import Tokenizer

__all__ = ["Tokenizer", "TokenizerSettings", "character_tokenizer", "tokenizer_from_gguf"]
