"""One gRPC servicer a file."""
