"""Serving: an engine with continuous batching, its HTTP server, and a load generator for any server."""
