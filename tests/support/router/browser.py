"""Headless Chromium over the Chrome DevTools Protocol: pages, their accessibility tree, and screenshots."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3
import websocket

from tests.support.loopback import HERE
from tests.support.router.doors import wait_until

TIMEOUT_S = 300
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox, which root has none of. Nothing but the page under test is loaded.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


class Page:
    """One tab.

    Attributes:
        problems: Exceptions and violations of the content policy that the page's console has shown.
    """

    def __init__(self, address: str) -> None:
        self._socket = websocket.create_connection(address, timeout=TIMEOUT_S)
        self._number = 0
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._socket.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and keep the problems that are reported meanwhile."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                # Statuses of responses are not the page's problem.
                self.problems += [entry["text"]] if entry["source"] != "network" else []
            elif message.get("method") == "Runtime.exceptionThrown":
                details = message["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", details).get("description", str(details)))
            elif message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(f"location.href === {json.dumps(url)} && document.readyState === 'complete'", "the page")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, what: str) -> None:
        """Wait until an expression is true in the page; one that fails is not true yet."""
        tried = f"(() => {{ try {{ return {script}; }} catch {{ return false; }} }})()"
        wait_until(lambda: bool(self.run(tried)), what)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of each node that a screen reader sees."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored")
        ]

    def emulate(self, *, dark: bool, calm: bool = False, width: int = 1360, height: int = 1000) -> None:
        """Set the preferred colours and motion, and the window's size."""
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))


@contextmanager
def browser_page(directory: Path) -> Iterator[Page]:
    """Run a browser with one tab; skip the test where there is none."""
    command = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if command is None:
        pytest.skip("no Chromium on PATH; on Debian: apt-get install chromium")
    profile = directory / "browser"
    with subprocess.Popen(
        [command, *_FLAGS, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.DEVNULL
    ) as browser:
        try:
            port_file = profile / "DevToolsActivePort"
            wait_until(lambda: port_file.exists() and "\n" in port_file.read_text(), "the browser")
            port = port_file.read_text().split()[0]
            tabs = urllib3.request("GET", f"http://{HERE}:{port}/json", timeout=TIMEOUT_S).json()
            page = Page(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"])
            try:
                yield page
            finally:
                page.close()
        finally:
            browser.terminate()
