"""Weights prepared for inference: prepacked for a kernel, or quantized to fewer bits."""

INT4_GROUP = 32
"""The number of inputs that share a scale and a zero point in torch's int4 layout."""
