"""Kernel declarations: which calls they support, and at what cost. The computations are in `attn_variants.compute`."""
