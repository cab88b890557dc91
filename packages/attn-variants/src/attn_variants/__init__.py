"""Attention mechanisms and their plain torch computation."""
