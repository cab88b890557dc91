"""TrainingService over gRPC."""
