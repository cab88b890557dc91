"""The gRPC door: health, reflection, rich errors, tokens, TLS; services are plugins."""
