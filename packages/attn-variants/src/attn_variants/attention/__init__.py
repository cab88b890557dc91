"""The layer that computes any attention spec: projections, whole sequences, documents, engine steps and kernels."""
