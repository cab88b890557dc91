"""Attention over latents."""
