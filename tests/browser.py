"""Chromium without a window, over its own protocol: pages, sizes, console, pictures. Only websocket-client is needed."""
import base64, itertools, json, shutil, subprocess, time
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0", "--remote-allow-origins=*", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
DESKTOP, PHONE = (1280, 900), (360, 740)


def chromium() -> str | None:
    "The browser of this machine, if it has one."
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    "One page of a fresh browser that reaches this machine alone."
    def __init__(self, folder: Path):
        self.process = subprocess.Popen([chromium(), *FLAGS, f"--user-data-dir={folder}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port, end = Path(folder)/"DevToolsActivePort", time.time() + 60
        while not (port.exists() and len(port.read_text().splitlines()) == 2):
            if time.time() > end or self.process.poll() is not None: raise RuntimeError("Chromium did not start")
            time.sleep(0.1)
        number, path = port.read_text().splitlines()
        self.socket = websocket.create_connection(f"ws://127.0.0.1:{number}{path}", timeout=60)
        self.ids, self.events, self.session = itertools.count(1), [], None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"): self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        "A command of the protocol and its answer; events that come in between are kept."
        number = next(self.ids)
        self.socket.send(json.dumps(dict(id=number, method=method, params=params) | ({"sessionId": self.session} if self.session else {})))
        while True:
            said = json.loads(self.socket.recv())
            if said.get("id") == number:
                if "error" in said: raise RuntimeError(f"{method}: {said['error']['message']}")
                return said["result"]
            self.events.append(said)

    def run(self, code: str):
        "The value of an expression, promises included."
        said = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said: raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", "") or said["exceptionDetails"]["text"])
        return said["result"].get("value")

    def until(self, code: str, seconds: float = 30):
        "Wait until an expression is true."
        end = time.time() + seconds
        while not (value := self.run(code)):
            if time.time() > end: raise TimeoutError(code)
            time.sleep(0.05)
        return value

    def open(self, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        "Open a page and wait until it and its charts are drawn."
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=size[0] < 600)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value="dark" if dark else "light")])
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete' && location.href != 'about:blank'")
        self.until("!document.querySelector('figure.chart.live') || document.documentElement.dataset.charts")

    def faults(self) -> list[str]:
        "What the console and the network complained about since the page was opened."
        self.run("1")
        out = []
        for e in self.events:
            p, m = e.get("params", {}), e.get("method")
            if m == "Runtime.exceptionThrown": out.append("exception: " + p["exceptionDetails"].get("exception", {}).get("description", p["exceptionDetails"]["text"]).splitlines()[0])
            if m == "Runtime.consoleAPICalled" and p["type"] == "error": out.append("console: " + " ".join(str(a.get("value", a.get("description", ""))) for a in p["args"]))
            if m == "Log.entryAdded" and p["entry"]["level"] == "error": out.append(f"{p['entry']['level']}: {p['entry']['text']} {p['entry'].get('url', '')}")
            if m == "Network.requestWillBeSent" and not p["request"]["url"].startswith(("http://127.0.0.1", "data:", "about:", "blob:")): out.append(f"asks the network: {p['request']['url']}")
        return out

    def picture(self, path: Path, whole: bool = False) -> Path:
        "A screenshot, of the window or of the whole page."
        path.parent.mkdir(parents=True, exist_ok=True)
        clip = {}
        if whole:
            box = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = dict(clip=dict(x=0, y=0, width=box["width"], height=min(box["height"], 8000), scale=1), captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"]))
        return path

    def close(self) -> None:
        "End the browser."
        try: self.session = None; self.call("Browser.close")
        except Exception: self.process.kill()
        self.process.wait(20)
