"""Inference over gRPC: engines in Ray actors behind one gateway."""
