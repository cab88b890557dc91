"""One function for each claim that is measured by an experiment; `claims.toml` names them."""
