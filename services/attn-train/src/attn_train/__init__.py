"""Training jobs over gRPC: durable, resumable, on Ray."""
