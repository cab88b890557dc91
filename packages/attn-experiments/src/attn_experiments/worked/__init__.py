"""Mechanisms computed number by number."""
