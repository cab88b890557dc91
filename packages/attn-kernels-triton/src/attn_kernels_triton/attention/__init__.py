"""Softmax attention: planning a call and launching its kernels."""
