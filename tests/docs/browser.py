"""A headless Chromium over its debugging pipe: what a page looks like to a reader, and what it says to the console."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Of the DevTools protocol: what a page says, and where.
COMPLAINTS = {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Network.loadingFailed"}


class Browser:
    """One tab. Offline, whatever a page asks of any host fails, and is a complaint."""

    def __init__(self, profile: Path, offline: bool = True):
        assert CHROMIUM is not None
        commands, self._out = os.pipe()
        self._in, events = os.pipe()

        def pipes() -> None:  # Chromium reads 3 and writes 4
            read, write = os.dup(commands), os.dup(events)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"],
            close_fds=False, preexec_fn=pipes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(commands)
        os.close(events)
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        tab = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        network = {"offline": offline, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.ask("Network.emulateNetworkConditions", **network)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._in)
        os.close(self._out)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 16)
            assert read, "Chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if found.get("method") in COMPLAINTS:
            self.complaints.append(json.dumps(found["params"])[:400])
        return found

    def ask(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, "sessionId": self._session}
        os.write(self._out, json.dumps({key: value for key, value in message.items() if value}).encode() + b"\0")
        while (answer := self._message()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def view(self, width: int, height: int, scheme: str = "light") -> None:
        """The next pages in a window of that size; `scheme`: what the reader's system prefers."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, page: Path | str) -> None:
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """The value of an expression, or of the promise that it is."""
        answer = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Until the expression is true, as the page's own timer sees it."""
        self.run(f"new Promise(done => {{ const look = () => {script} ? done() : setTimeout(look, 20); look(); }})")

    def picture(self, file: Path) -> None:
        import base64

        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot")["data"]))
