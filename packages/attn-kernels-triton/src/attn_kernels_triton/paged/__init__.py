"""Attention over a paged KV cache: checks, splitting into work items, and launches."""
