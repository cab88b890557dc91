"""Declarations of the kernels: accepted problems and costs. They are launched in the folder of each operation."""
