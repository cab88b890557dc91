"""Plugins: the hooks they implement, how they are found and loaded, and the catalog of what they offer."""
