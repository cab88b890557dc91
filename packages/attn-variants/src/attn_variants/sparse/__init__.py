"""Layers of sparse mechanisms that their masks alone do not say."""
