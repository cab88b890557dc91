"""Attention over tiles of queries and the keys they see."""
