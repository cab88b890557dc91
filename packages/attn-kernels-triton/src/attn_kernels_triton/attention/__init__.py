"""Attention of the softmax family: what is checked, planned and launched."""
