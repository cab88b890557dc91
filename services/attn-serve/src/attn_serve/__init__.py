"""Inference over gRPC: engines as Ray actors behind one gateway."""
