"""Training tasks: for each, its dataset in memory, its batches, its loss and its metrics. No Ray and no gRPC."""
