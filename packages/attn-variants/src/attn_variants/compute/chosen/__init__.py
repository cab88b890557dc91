"""Attention to chosen blocks of keys."""
