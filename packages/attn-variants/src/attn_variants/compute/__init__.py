"""The torch computations behind the kernels."""
