"""Kernels in C++ for serving on CPUs. Imports neither torch nor a compiler's output."""
