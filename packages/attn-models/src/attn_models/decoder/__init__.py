"""One decoder for every causal mechanism."""
