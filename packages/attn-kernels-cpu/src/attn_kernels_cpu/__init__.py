"""C++ kernels for serving and training on CPUs. Importing this package loads neither torch nor compiled libraries."""
