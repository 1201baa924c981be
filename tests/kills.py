"""Train, measure and execute a notebook; killed without warning at chosen and at random moments, begun again each time, compared with an undisturbed run.

    python kills.py FOLDER OPTIMIZER SEED [NAME=VALUE ...]    prints one line of JSON: how often it was killed, and where

Everything is imported once; each attempt is a fork, so a resume costs a fraction of a second.
"""
import collections, dataclasses, hashlib, json, os, random, signal, sys, threading, traceback, warnings
from pathlib import Path

import nbformat, torch

from cl_nscl import twins
from cl_nscl.core import Params
from cl_nscl.measure import measured
from cl_nscl.run import NotebookFailed, execute
from cl_nscl.store import load_checkpoint, stored_run, train_runs

torch.set_num_threads(1)
OBJECTIVES = ("cl", "ntxent", "nscl", "scl", "ce")
P = Params(dataset="digits", n_train=100, size=8, encoder="resnet8", width=0.25, proj_hidden=16, proj_dim=8, B=25, epochs=8, warmup=1, lr=0.1, flip=0, snapshots=4)
CELLS = [("kill: str = ''  # where\nout: str = 'out'  # folder", ["parameters"]),
         ("import sys\nsys.path.insert(0, {tests!r})\nfrom kills import Killer\nif kill: Killer('half', kill, 1, 0)", []),
         ("import pandas as pd\nfrom pathlib import Path\nfrom cl_nscl.report import Results, save_results\n"
          "rows = pd.concat(map(pd.read_csv, sorted(Path('runs/measured').glob('*.csv'))))\n"
          "save_results(Results('01_kills', Path(out), 'Kills', {{}}, tables={{'first': rows.head(3)}}, rows={{'rows': rows, 'more': rows}}));", [])]


def runs(**change): return [stored_run(dataclasses.replace(P, objective=o, **change), "runs") for o in OBJECTIVES]
def with_notebook(change): return change in (dict(optimizer="sgd"), dict(optimizer="lars"))
def die(): os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    "Kills this process at the n-th event: when a file is half written, before it is renamed, some time after it was, or some time after a step or a call."
    def __init__(self, mode: str, what: str, n: int, delay: float):
        self.mode, self.what, self.left, self.delay = mode, what, n, delay
        self.fsync, self.replace = os.fsync, os.replace
        os.fsync, os.replace = self._fsync, self._replace

    def _due(self, mode, name):
        if self.mode != mode or not name.lstrip(".").startswith(self.what): return False
        self.left -= 1
        return self.left == 0

    def _fsync(self, fd):
        if self._due("half", Path(os.readlink(f"/proc/self/fd/{fd}")).name):
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
            die()
        self.fsync(fd)

    def _replace(self, a, b, **kw):
        name = Path(b).name
        if self._due("before", name): die()
        self.replace(a, b, **kw)
        if self._due("after", name): threading.Timer(self.delay, die).start() if self.delay else die()

    def moment(self, name): # a step was made, a phase begins
        if self._due("moment", name): threading.Timer(self.delay, die).start()


def attempt(change, kill=None):
    "In a fork: everything that is missing. -> how the fork ended"
    if pid := os.fork(): return os.waitpid(pid, 0)[1]
    code = 1
    try:
        killer, batch = Killer(*kill) if kill else Killer("", "", 0, 0), twins.twin_batch
        def watched(tw, t): # what each step looks at
            v, y = batch(tw, t)
            with open("batches.txt", "a") as f: f.write(f"{t} {hashlib.sha256(v.numpy().tobytes() + y.numpy().tobytes()).hexdigest()}\n")
            return v, y
        twins.twin_batch = watched
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* (cannot be|is not) used")  # no file is ever found damaged
            train_runs(runs(**change), minutes=0, report=lambda *_: killer.moment("step"))
        killer.moment("measure")
        measured("alignment", runs(**change)[:3], 50)
        if with_notebook(change):
            killer.moment("notebook")
            inside = kill[1] if kill and kill[0] == "kernel" else ""
            if not Path("out/01_kills.ipynb").exists(): execute(Path("01_kills.ipynb"), dict(kill=inside), Path("out"))
        code = 0
    except NotebookFailed as e:
        print(e, file=sys.stderr)
        code = 7
    except BaseException: traceback.print_exc()
    finally: os._exit(code)


def same(a, b): # to the last bit, whatever a state holds
    if isinstance(a, torch.Tensor): return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(folder, optimizer, seed, *more):
    change, rng = dict(optimizer=optimizer) | {k: json.loads(v) for k, _, v in (m.partition("=") for m in more)}, random.Random(int(seed))
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c.format(tests=str(Path(__file__).parent)), metadata=dict(tags=t), id=f"c{i}") for i, (c, t) in enumerate(CELLS)],
                                    metadata=dict(kernelspec=dict(name="python3", display_name="python3", language="python")))
    for name in ("through", "killed"): (at := Path(folder)/name).mkdir(parents=True); nbformat.write(nb, at/"01_kills.ipynb")
    os.chdir(f"{folder}/through")
    assert attempt(change) == 0
    through, states = {p.as_posix(): p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file()}, [load_checkpoint(r) for r in runs(**change)]
    os.chdir(f"{folder}/killed")
    steps = [("moment", "step", rng.randint(1, 4), rng.uniform(0, 0.1)) for _ in range(4)]
    writes = [(mode, what, rng.randint(1, 7), rng.uniform(0, 0.05) if mode == "after" else 0) for mode, what in (("half", "checkpoint"), ("before", "checkpoint"), ("after", "checkpoint"), ("half", "snapshot"), ("after", "snapshot"), ("half", "history"))]
    rng.shuffle(training := steps + writes)
    late = [("half", "done.json", rng.randint(1, 5), 0), ("after", "done.json", 1, rng.uniform(0, 0.01)), ("moment", "measure", 1, rng.uniform(0, 0.1)), ("half", "", 1, 0)]
    notebook = [("moment", "notebook", 1, rng.uniform(0.3, 1)), ("kernel", "01_kills.begun", 1, 0), ("kernel", "more.csv", 1, 0), ("kernel", "01_kills.json", 1, 0)]
    kills, counts = [("half", "params.json", 2, 0), *training, *late, *(notebook if with_notebook(change) else [])], collections.Counter()
    for kill in kills:
        status = attempt(change, kill)
        ended = os.waitstatus_to_exitcode(status)
        assert ended == (7 if kill[0] == "kernel" else -9), (kill, ended)
        counts[f"{kill[0]} {kill[1]}".strip()] += 1
        for r in runs(**change): assert not r.done or all(t in r.snapshots for t in (0, 8, 16, 24, 32))
        assert not Path("out/01_kills.ipynb").exists()
        if kill[0] == "kernel": assert not Path("out/01_kills.json").exists() # a kernel whose parent was killed may still end its cell: whole results, and no notebook
    for p in Path("runs/measured").glob(".*.tmp"): os.utime(p, (1, 1))       # that folder has many writers: only what has been left for a minute is swept
    assert attempt(change) == 0
    for r, want in zip(runs(**change), states): assert same(load_checkpoint(r), want), r.p.objective
    differ = lambda p: any(part in (".lock", ".owner", "batches.txt", "failed") for part in p.parts) or p.name == "done.json"
    killed = {p.as_posix(): p.read_bytes() for p in sorted(Path().rglob("*")) if p.is_file()}
    keep = lambda files: {p: b for p, b in files.items() if not differ(Path(p))}
    assert keep(killed).keys() == keep(through).keys(), keep(killed).keys() ^ keep(through).keys()   # no stray, no second file
    assert [p for p, b in keep(killed).items() if b != through[p] and not p.endswith(".pt")] == []
    seen = [{tuple(line.split()) for line in Path(f).read_text().splitlines()} for f in ("batches.txt", "../through/batches.txt")]
    assert seen[0] == seen[1] and len(seen[0]) == 32                         # whenever a step was made, it was made on the same views
    print(json.dumps(counts))


if __name__ == "__main__": main(*sys.argv[1:])
