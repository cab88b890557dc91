"""Positions as vectors that rows, queries, keys and values are given."""
