"""A headless chromium over its debugging pipe: no driver, no package, no port."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
Json = dict[str, Any]


class Browser:
    """Sends commands and reads answers; what happens meanwhile is kept in `happened`."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._number = 0
        self._session: str | None = None
        self.happened: list[Json] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = session
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def _next(self) -> Json:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 20)
            assert part, "chromium has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: Json = json.loads(message)
        return found

    def call(self, method: str, **params: object) -> Json:
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: Json = answer["result"]
                return result
            self.happened.append(answer)

    def open(self, path: Path, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Load a page and wait until it has drawn itself."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.happened.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.happened):
            self.happened.append(self._next())
        ready = "new Promise(done => { const look = () => document.documentElement.dataset.ready"
        self.value(f"{ready} ? done(1) : setTimeout(look, 5); look(); }})")

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives; a promise is waited for."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def complaints(self) -> list[str]:
        """Errors of scripts and of the content security policy since the page was opened."""
        self.value("1")
        found = []
        for event in self.happened:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that the page asked for, itself included."""
        self.value("1")
        sent = [
            e["params"] for e in self.happened if e.get("method") == "Network.requestWillBeSent"
        ]
        return [params["request"]["url"] for params in sent]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                         **({"clip": self._whole()} if whole else {}))  # fmt: skip
        path.write_bytes(base64.b64decode(shot["data"]))

    def _whole(self) -> Json:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}

    def pdf(self, path: Path) -> None:
        path.write_bytes(
            base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
        )


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A fresh chromium with a profile of its own, ended at the end."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program, "there is no chromium: apt-get install chromium"
    out_read, out_write = os.pipe()
    in_read, in_write = os.pipe()
    script = f'exec "$0" "$@" 3<&{in_read} 4>&{out_write}'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
                 "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                 f"--user-data-dir={profile}"]  # fmt: skip
        process = subprocess.Popen(
            ["bash", "-c", script, program, *flags],
            pass_fds=(in_read, out_write),
            stderr=subprocess.DEVNULL,
        )
        os.close(in_read)
        os.close(out_write)
        try:
            yield Browser(in_write, out_read)
        finally:
            process.terminate()
            process.wait(20)
            os.close(in_write)
            os.close(out_read)
