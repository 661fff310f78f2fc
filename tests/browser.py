"""A real browser for tests: headless Chromium, driven by the DevTools protocol over a WebSocket.

It needs Debian's package `chromium`. No page can reach a network: tests open files, and the browser
resolves no host name.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.pools import until

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--remote-debugging-port=0"
).split()  # no sandbox: tests may run as root, and open only our own file
INSTALL = "the tests of paw_min.inspect need a browser: apt-get install chromium"


class Browser:
    """One page of a headless Chromium. `problems`: what it wrote to its console, and errors."""

    def __init__(self, profile: Path):
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            pytest.skip(INSTALL)  # in CI, conftest.py makes this a failure
        command = [program, *FLAGS, "--host-resolver-rules=MAP * ~NOTFOUND"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        self.process = subprocess.Popen(
            command, env=os.environ | {"HOME": str(profile)}, stderr=subprocess.DEVNULL
        )
        address = profile / "DevToolsActivePort"  # a port, and a path
        until(lambda: address.exists() and len(address.read_text().splitlines()) == 2)
        url = "ws://127.0.0.1:{}{}".format(*address.read_text().splitlines())
        self.connection = ExitStack()
        self.socket = self.connection.enter_context(connect(url, max_size=None, proxy=None))
        self.number, self.session, self.problems = 0, None, []
        (page,) = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters) -> dict:
        """Send a command -> its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while (answer := json.loads(self.socket.recv(timeout=60))).get("id") != self.number:
            self._event(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _event(self, event: dict) -> None:
        method, parameters = event.get("method"), event.get("params")
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            if not parameters["request"]["url"].startswith("file:"):
                self.problems.append(f"a request to {parameters['request']['url']}")

    def open(self, file: Path, width: int = 1280) -> None:
        """Load a file in a window of this width."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=900, mobile=False,
             deviceScaleFactor=1)
        url = file.resolve().as_uri()
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=url)
        end = time.monotonic() + 60
        while self.run("location.href.split('#')[0] + document.readyState") != url + "complete":
            assert time.monotonic() < end, f"{file} did not load"
            time.sleep(0.02)

    def run(self, expression: str):
        """The value of a JavaScript expression."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True,
                      awaitPromise=True)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        for event in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=event, key=key)

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.wait(60)
