"""The PyTorch computations of the kernels."""
