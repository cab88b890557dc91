"""Families of models, and the doors through which other libraries' checkpoints come in."""
