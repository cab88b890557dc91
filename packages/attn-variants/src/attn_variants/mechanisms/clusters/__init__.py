"""Attention within hash buckets and clusters."""
