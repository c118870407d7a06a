"""Answers of `ironlaw plan` on clusters: the chosen layout, why others are slower, and advice on changes."""
