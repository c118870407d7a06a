"""Serving: an engine with continuous batching, its HTTP server, and a load generator for any server."""

from ironlaw.package import callable_room

callable_room(__name__)
