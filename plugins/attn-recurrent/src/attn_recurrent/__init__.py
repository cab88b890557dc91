"""Mixers with a matrix as state: Gated DeltaNet and Mamba-2."""
