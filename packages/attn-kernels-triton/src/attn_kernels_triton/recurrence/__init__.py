"""Launching the programs of linear recurrences."""
