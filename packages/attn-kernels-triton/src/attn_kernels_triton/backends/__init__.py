"""Kernels as declarations: what they accept and cost. How they are launched is in the folder of their operation."""
