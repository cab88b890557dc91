"""Training tasks: the dataset, batches, loss and metrics of each. Independent of Ray and gRPC."""
