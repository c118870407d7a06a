"""Plans of layouts on a catalogued cluster, evaluated many at once as columns of arrays."""
