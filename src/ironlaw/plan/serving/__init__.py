"""Serving, planned: what a prompt and a token take, how many requests fit, and what they cost."""
