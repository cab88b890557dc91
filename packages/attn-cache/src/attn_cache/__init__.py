"""What is remembered between decoding steps: contiguous, paged, fixed and source states."""
