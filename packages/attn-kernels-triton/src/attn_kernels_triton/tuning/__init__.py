"""Autotuning: measures candidate launch parameters on a device on request, and stores the fastest for later calls."""
