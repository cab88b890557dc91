"""Kernels as declarations: what they accept and cost. The computations are in `attn_variants.compute`."""
