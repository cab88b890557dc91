"""Mechanisms broken on purpose: each breaks one law and keeps all others, which proves that the law bites."""
