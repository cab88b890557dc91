"""The Triton kernels, which run on the GPU, and their arguments. Importing anything here needs triton."""
