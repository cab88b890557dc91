"""Attention through matrices of low rank."""
