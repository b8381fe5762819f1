"""Headless Chromium: what a script finds in a page, what keys do there, and what the page complains of or asks for."""

from __future__ import annotations

import atexit
import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOUND = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needed = pytest.mark.skipif(FOUND is None, reason="no Chromium on this machine")

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
_KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
}


class _Browser:
    """One process, spoken to in the DevTools protocol over its descriptors 3 and 4."""

    def __init__(self) -> None:
        assert FOUND is not None
        folder = tempfile.TemporaryDirectory()
        pipes = [os.pipe(), os.pipe()]
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (pipes[0][0], pipes[1][1])]  # above 3 and 4
        command = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", FOUND, *_FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={folder.name}"], pass_fds=theirs, stderr=subprocess.DEVNULL
        )
        for end in (*theirs, pipes[0][0], pipes[1][1]):
            os.close(end)
        self._out, self._in = pipes[0][1], pipes[1][0]
        self._read, self._last = b"", 0
        self.events: list[dict[str, Any]] = []
        atexit.register(folder.cleanup)
        atexit.register(process.wait)
        atexit.register(process.kill)

    def call(self, method: str, session: str | None = None, **given: Any) -> dict[str, Any]:
        """The answer to a method; what happens meanwhile is added to ``events``."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": given} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._last:
            self.events.append(found)
        assert "result" in found, found
        return dict(found["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            assert select.select([self._in], [], [], 120)[0], "Chromium is silent"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium has ended"
            self._read += more
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def wait(self, event: str) -> None:
        while not any(one.get("method") == event for one in self.events):
            self.events.append(self._next())


_browser = cache(_Browser)


class Tab:
    """A page that is open."""

    def __init__(self, session: str) -> None:
        self._session = session

    def call(self, method: str, **given: Any) -> dict[str, Any]:
        return _browser().call(method, self._session, **given)

    def go(self, page: Path) -> None:
        """Opens another page; what was before is forgotten."""
        _browser().events.clear()
        self.call("Page.navigate", url=page.as_uri())
        _browser().wait("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Presses a key as a person does: where the focus is."""
        code, text = _KEYS[key]
        given = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def picture(self, path: Path, **given: Any) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **given)["data"]))

    def complaints(self) -> list[str]:
        """What the console has, and requests for what is not on the disk."""
        self.run("0")
        found = []
        for event in _browser().events:
            given = event["params"]
            if event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                found.append(json.dumps(given))
            elif event["method"] == "Network.requestWillBeSent":
                url = given["request"]["url"]
                found += [] if url.startswith(("file:", "data:", "blob:")) else [f"asks for {url}"]
        return found


@contextmanager
def opened(page: Path, *, width: int, dark: bool = False, paper: bool = False) -> Iterator[Tab]:
    """A page in a window of this width, in a profile of its own. paper: as printed."""
    browser = _browser()
    profile = browser.call("Target.createBrowserContext")["browserContextId"]
    target = browser.call("Target.createTarget", url="about:blank", browserContextId=profile)["targetId"]
    tab = Tab(browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
    try:
        for room in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{room}.enable")
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", media="print" if paper else "", features=[scheme])
        tab.go(page)
        yield tab
    finally:
        browser.call("Target.disposeBrowserContext", browserContextId=profile)


def look(page: Path, script: str, *, width: int, dark: bool = False, paper: bool = False) -> tuple[Any, list[str]]:
    """What an expression over a page gives, and complaints."""
    with opened(page, width=width, dark=dark, paper=paper) as tab:
        return tab.run(script), tab.complaints()
