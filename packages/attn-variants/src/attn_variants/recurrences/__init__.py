"""Memories of fixed size that are updated linearly: one mathematics, three equal ways to compute it."""
