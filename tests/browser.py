"""Drives headless Chromium over a pipe, by the DevTools protocol; needs nothing but Chromium itself."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    *("--disable-dev-shm-usage", "--mute-audio", "--remote-debugging-pipe"),
)
_SECONDS = 60

# Chromium reads from 3 and writes to 4, so the ends of the pipes are put there before it starts.
_PLACE = """
import os, sys
read, write = (os.dup(int(number)) for number in sys.argv[1:3])
read, write = os.dup(read), os.dup(write)
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab. ``said`` has what its console and its policy complained about, and ``asked`` every address it loaded."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = read, write
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.said: list[str] = []
        self.asked: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while True:
            for answer in self._messages(end):
                if answer.get("id") == self._number:
                    if "error" in answer:
                        raise RuntimeError(f"{method}: {answer['error']}")
                    return answer["result"]
                self._event(answer)

    def _messages(self, end: float) -> Iterator[dict[str, Any]]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium did not answer within {_SECONDS} s")
            new = os.read(self._read, 1 << 16)
            if not new:
                raise RuntimeError("Chromium ended")
            self._rest += new
        text, _, self._rest = self._rest.partition(b"\0")
        yield json.loads(text)

    def _event(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.said.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.said.append(str([each.get("value") for each in found["args"]]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.said.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(found["request"]["url"])

    def look(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and what the system says of colours."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Load a page, and wait until its script has drawn it."""
        self.send("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + _SECONDS
        while not self.run("location.protocol === 'file:' && document.documentElement?.dataset.ready === ''"):
            if time.monotonic() > end:
                raise TimeoutError(f"the page was not drawn within {_SECONDS} s: {self.said}")
            time.sleep(0.05)
        self.settle()

    def settle(self) -> None:
        """Wait for the next frame, when what changed is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, code: str) -> Any:
        """What an expression comes to in the page."""
        found = self.send("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def key(self, name: str) -> None:
        """Press a key that types nothing."""
        for kind in ("rawKeyDown", "keyUp"):
            code = {"Tab": 9, "ArrowRight": 39}[name]
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def screenshot(self, path: Path, first: str = "body", last: str = "body") -> None:
        """The page from the top of one element to the bottom of another, as PNG."""
        top, bottom = (
            self.run(f"document.querySelector('{s}').getBoundingClientRect()['{side}'] + scrollY")
            for s, side in ((first, "top"), (last, "bottom"))
        )
        clip = {"x": 0, "y": top, "width": self.run("innerWidth"), "height": bottom - top, "scale": 1}
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A new Chromium with an empty profile."""
    assert CHROMIUM is not None
    to_child, from_child = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _PLACE,
                str(to_child[0]),
                str(from_child[1]),
                CHROMIUM,
                *FLAGS,
                f"--user-data-dir={folder}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(to_child[0], from_child[1]),
        )
        os.close(to_child[0])
        os.close(from_child[1])
        try:
            yield Browser(from_child[0], to_child[1])
        finally:
            os.close(to_child[1])
            os.close(from_child[0])
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
