"""Mechanisms and options compared by training: equal budgets, several seeds, intervals, a report."""
