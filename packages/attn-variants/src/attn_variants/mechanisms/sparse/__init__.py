"""Mechanisms that let a query see few keys."""
