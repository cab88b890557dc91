"""The training loop: torch only, no Ray and no gRPC."""
