"""Attention along the edges of graphs."""
