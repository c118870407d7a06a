"""The plan of layouts on a catalogued cluster: many at once, as columns of arrays."""
