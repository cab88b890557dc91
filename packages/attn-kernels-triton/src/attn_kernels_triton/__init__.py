"""Triton kernels for GPUs. Nothing imports torch or triton before a kernel runs."""
