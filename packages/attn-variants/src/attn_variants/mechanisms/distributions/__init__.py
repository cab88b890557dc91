"""Mechanisms that turn scores into weights in other ways."""
