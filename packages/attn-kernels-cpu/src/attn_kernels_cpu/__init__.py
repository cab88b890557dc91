"""Kernels in C++ for serving on x86 CPUs, compiled on first use. Imports neither torch nor a compiler's output."""
