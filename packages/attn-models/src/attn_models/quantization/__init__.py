"""Weights prepared for inference: prepacked for a kernel, or quantized to fewer bits."""
