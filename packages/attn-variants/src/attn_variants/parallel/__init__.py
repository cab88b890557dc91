"""Attention over sequences whose tokens several ranks hold (context parallelism)."""
