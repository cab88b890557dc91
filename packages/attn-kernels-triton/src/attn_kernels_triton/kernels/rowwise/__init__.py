"""Programs that compute on each row alone."""
