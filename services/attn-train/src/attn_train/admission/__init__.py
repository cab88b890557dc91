"""Checks that a job passes before it is accepted."""
