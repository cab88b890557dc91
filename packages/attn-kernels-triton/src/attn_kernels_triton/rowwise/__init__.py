"""Launching the kernels of row-wise operations."""
