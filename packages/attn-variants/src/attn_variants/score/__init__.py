"""Scoring functions e = f(q, k): their computation and their learned parameters."""
