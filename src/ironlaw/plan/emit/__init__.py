"""A layout as another trainer's own options."""
