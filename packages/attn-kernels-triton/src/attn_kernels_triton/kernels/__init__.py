"""What runs on the GPU. Importing anything here needs triton."""
