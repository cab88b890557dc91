"""Comparison of mechanisms and options by training them with equal budgets and several seeds; writes a report."""
