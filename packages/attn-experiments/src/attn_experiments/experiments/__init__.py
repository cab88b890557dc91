"""The experiments: one function for each claim that is measured by one; `claims.toml` names them."""
