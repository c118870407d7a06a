"""`ironlaw serve` in one process: uvicorn with the API, which announces when it is ready, and drains on a signal."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from typing import Any

from ironlaw.errors import UserError
from ironlaw.serve.config import ServeConfig
from ironlaw.serve.engine import Engine

SHUTDOWN_SECONDS = 5.0  # after draining, for clients to be told


def require_extra() -> None:
    """Raise a one-line UserError if the extra is not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serving needs an extra ({error.name} is missing): pip install 'ironlaw[serve]'") from None


def bind_socket(config: ServeConfig) -> socket.socket:
    """Return a socket bound to the server's address. Connections are refused until the server listens on it."""
    address = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        address.bind((config.host, config.port))
    except (OSError, TypeError, ValueError) as error:  # the last two for what no name of a host can hold
        address.close()
        raise _address_error(config, error) from None
    return address


def _address_error(config: ServeConfig, why: Exception) -> UserError:
    where = f"cannot listen on {config.host}:{config.port} ({getattr(why, 'strerror', None) or why})"
    return UserError(f"{where}: use another serve.host, or serve.port (0: any free one)")


def serve(engine: Engine, on_ready: Callable[[str], None], address: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM. Requests in progress are then finished, new ones refused."""
    try:
        build_server(engine, on_ready).run([address])
    except OSError as error:  # another process has begun to listen there
        raise _address_error(engine.config, error) from None


def build_server(engine: Engine, on_ready: Callable[[str], None]) -> Any:
    """Return a `uvicorn.Server`. `on_ready` is called with the URL."""
    import uvicorn

    from ironlaw.serve.api import create_app

    config = engine.config
    app = create_app(engine)

    class AnnouncedServer(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                host, port = self.servers[0].sockets[0].getsockname()[:2]
                on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")

        def handle_exit(self, sig: int, frame: Any) -> None:
            # Replaces uvicorn's handler, which raises the signal again at the end: a server that drained has succeeded.
            engine.is_draining = True
            if self.should_exit:  # second signal: stop now
                engine.stop()
                self.force_exit = True
            else:  # what then still runs is told that the server ends
                end = threading.Timer(config.drain_seconds, engine.stop)
                end.daemon = True
                end.start()
            self.should_exit = True

    settings = uvicorn.Config(
        app, host=config.host, port=config.port, log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds + SHUTDOWN_SECONDS), timeout_keep_alive=30,
        limit_concurrency=config.batch + config.waiting + 1024, backlog=2048,
    )  # fmt: skip
    return AnnouncedServer(settings)
