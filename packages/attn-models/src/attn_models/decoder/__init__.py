"""A decoder that works with every causal mechanism."""
