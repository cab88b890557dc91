"""Attention over memories of its own making."""
