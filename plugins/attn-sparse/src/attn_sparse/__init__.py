"""Sparse attention that selects its keys by content: DeepSeek's, mixture of block and native sparse attention."""
