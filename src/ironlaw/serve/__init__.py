"""Serving: an engine with continuous batching, its HTTP server, and a load generator for any server."""

import ironlaw

ironlaw.callable_room(__name__)
