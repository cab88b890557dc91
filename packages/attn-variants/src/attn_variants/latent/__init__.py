"""Attention that remembers one small latent per token in place of keys and values."""
