"""Launching the programs that compute on each row alone."""
