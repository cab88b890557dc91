"""Distribution functions, one a file; `attn_variants.compute.distribution` chooses among them."""
