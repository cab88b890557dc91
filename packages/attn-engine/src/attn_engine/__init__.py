"""Continuous batching and sampling over any model and any cache, in process."""
