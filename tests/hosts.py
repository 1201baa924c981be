"""Several hosts on one machine, each with its own name, address and network stack, behind one bridge. Linux, root, Debian's iproute2."""
import os, shutil, subprocess, sys, tempfile
from pathlib import Path

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# What runs on a host sees its name, and in /etc/hosts all the names.
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def missing() -> str: # why there can be no hosts here; empty: there can
    lacking = [p for p in ("ip", "nsenter", "unshare", "mount") if not shutil.which(p, path=PATH)]
    if lacking: return f"programs are not installed: {', '.join(lacking)}"
    if os.geteuid(): return "network namespaces need root"
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(Path(folder), 1) as h: done = subprocess.run(h.on("node0", "true"), capture_output=True, text=True)
    except RuntimeError as e: return f"no network namespaces here: {e}"
    return f"no host can be entered here: {done.stderr.strip()}" if done.returncode else ""


def _ip(*words): return subprocess.run(["ip", *map(str, words)], env=os.environ | {"PATH": PATH}, capture_output=True, text=True)


class Hosts:
    "`n` hosts that reach each other, and the machine itself at `gateway`, for as long as the block lasts."
    def __init__(self, folder: Path, n: int):
        own = os.getpid() % 2**15 # so that tests side by side do not meet
        self.net, self.bridge, self.table = f"10.{128 + own // 256}.{own % 256}", f"nscl{own}", folder/"hosts"
        self.address = {f"node{i}": f"{self.net}.{i + 2}" for i in range(n)}
        self.gateway, self.space = f"{self.net}.1", {h: f"{self.bridge}-{h}" for h in self.address}

    def __enter__(self):
        self.table.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {h}\n" for h, a in self.address.items()))
        try:
            self._do("link", "add", self.bridge, "type", "bridge")
            self._do("addr", "add", f"{self.gateway}/24", "dev", self.bridge)
            self._do("link", "set", self.bridge, "up")
            for i, (host, space) in enumerate(self.space.items()):
                self._do("netns", "add", space)
                self._do("link", "add", out := f"{self.bridge}v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
                self._do("link", "set", out, "master", self.bridge, "up")
                self._do("-n", space, "addr", "add", f"{self.address[host]}/24", "dev", "eth0")
                for device in ("lo", "eth0"): self._do("-n", space, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self.space.values(): _ip("netns", "del", space)
        _ip("link", "del", self.bridge)

    def on(self, host: str, *argv) -> list[str]: # the command line that runs `argv` on a host
        return ["nsenter", f"--net=/run/netns/{self.space[host]}", "unshare", "--uts", "--mount", "sh", "-c", ENTER, "sh", host, str(self.table), *map(str, argv)]

    def _do(self, *words):
        if (done := _ip(*words)).returncode: raise RuntimeError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")


if __name__ == "__main__": sys.exit(missing() or 0)
