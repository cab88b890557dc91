"""The training service of attn: durable, resumable training jobs over gRPC."""
