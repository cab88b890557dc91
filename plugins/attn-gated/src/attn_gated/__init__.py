"""Softmax attention with gates: gated attention, forgetting attention, differential attention."""
