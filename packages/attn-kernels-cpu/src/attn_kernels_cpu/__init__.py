"""Kernels in C++ for serving and training on CPUs. Imports neither torch nor a compiler's output."""
