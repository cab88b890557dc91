"""Mechanisms that treat positions, or the range of scores, in other ways."""
