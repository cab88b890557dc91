"""Launching the kernels of linear recurrences."""
