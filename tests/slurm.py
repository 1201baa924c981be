"""A real Slurm of one node, or of several hosts, in a temporary folder, for as long as a test needs it. Debian: slurmctld, slurmd, slurm-client, munge; root."""
import contextlib, os, shutil, socket, subprocess, tempfile, threading, time
from pathlib import Path

from hosts import Hosts

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol")
CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmdPort={slurmd}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
JobRequeue=1
KillWait=2
MinJobAge=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmctldTimeout=30
SlurmdTimeout=30
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing() -> str: # why there can be no Slurm here; empty: there can
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    lacking = [p for p in PROGRAMS if not shutil.which(p, path=path)]
    if lacking: return f"Slurm's programs are not installed: {', '.join(lacking)}"
    return "" if os.geteuid() == 0 else "starting Slurm's daemons needs root"


def _free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for s in sockets: s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets: s.close()
    return ports


class Slurm:
    "Started by entering; `env` is what its clients need."
    def __init__(self, folder: Path, cpus: int = 4, hosts: Hosts | None = None): # without hosts, the machine itself is the only node
        self.folder, self.cpus, self.daemons, self.hosts, self.host = folder, cpus, [], hosts, socket.gethostname().split(".")[0]
        self.nodes = hosts.address if hosts else {self.host: "127.0.0.1"}
        self.env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def __enter__(self):
        os.chmod(self.folder, 0o755) # munged refuses a folder that others may write to
        port, slurmd = _free_ports(2)
        nodes = "\n".join(f"NodeName={n} NodeAddr={a} CPUs={self.cpus} RealMemory=1000 State=UNKNOWN" for n, a in self.nodes.items())
        (self.folder/"slurm.conf").write_text(CONF.format(folder=self.folder, host=self.host, address=self.hosts.gateway if self.hosts else "127.0.0.1", nodes=nodes, port=port, slurmd=slurmd))
        (self.folder/"state").mkdir()
        subprocess.run(["mungekey", "--create", f"--keyfile={self.folder}/munge.key"], env=self.env, check=True)
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key", f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
                        f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munge.seed")
            self._until(lambda: (self.folder/"munge.socket").exists())
            self._start("slurmctld", "-D", "-i")
            self._until(lambda: self.call("scontrol", "ping").returncode == 0)
            for n in self.nodes:
                (self.folder/f"spool-{n}").mkdir()
                self._start(*(self.hosts.on(n, "slurmd", "-D", "-N", n) if self.hosts else ("slurmd", "-D", "-N", n)))
            self._until(lambda: self.call("sinfo", "-h", "-N", "-o", "%T").stdout.split() == ["idle"] * len(self.nodes))
            self.closing = threading.Event()
            threading.Thread(target=self._hasten, daemon=True).start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _hasten(self): # Slurm lets two minutes pass before it starts a requeued job again
        while not self.closing.wait(1):
            for job in self.call("squeue", "-h", "-t", "PENDING", "-o", "%A %r").stdout.splitlines():
                if job.endswith("BeginTime"): self.call("scontrol", "update", f"JobId={job.split()[0]}", "StartTime=now")

    def __exit__(self, *_):
        if hasattr(self, "closing"): self.closing.set()
        self.call("scancel", "--user=root")
        for p in reversed(self.daemons): p.terminate()
        for p in reversed(self.daemons):
            try: p.wait(3)
            except subprocess.TimeoutExpired: p.kill(); p.wait()

    def call(self, *argv, **kw): return subprocess.run([*map(str, argv)], env=self.env, capture_output=True, text=True, timeout=60, **kw)

    def _start(self, *argv):
        with open(self.folder/f"{argv[0]}{len(self.daemons)}.out", "w") as out: self.daemons.append(subprocess.Popen(argv, env=self.env, stdout=out, stderr=subprocess.STDOUT))

    def _until(self, ready, seconds=240):
        end = time.time() + seconds
        while not ready():
            dead = [p for p in self.daemons if p.poll() is not None]
            if dead or time.time() > end: raise RuntimeError(f"Slurm did not start: {dead}\n" + "\n".join(f"{f.name}:\n{f.read_text()[-2000:]}" for f in sorted(self.folder.glob("*.[ol]*")) if f.is_file()))
            time.sleep(0.1)


@contextlib.contextmanager
def running(**kw): # as `Slurm`; this process and those that it starts are its clients
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="slurm", dir="/var/tmp") as d, Slurm(Path(d), **kw) as s:
        os.environ.update({k: s.env[k] for k in ("SLURM_CONF", "PATH")})
        try: yield s
        finally: os.environ.clear(); os.environ.update(before)
