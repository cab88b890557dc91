"""Mechanisms that score pairs in other ways."""
