"""Faults of one machine, for real: full disks, folders that cannot be written to, memory that ends, dead workers, two processes and one run, damaged and foreign files."""
import contextlib, dataclasses, io, json, os, pickle, platform, resource, shutil, signal, subprocess, sys, threading, time, warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat, numpy as np, pytest, torch
from PIL import Image

from cl_nscl import images
from cl_nscl.core import Params, UserError
from cl_nscl.plan import Failed, layered, study, train_plan
from cl_nscl.run import NotebookFailed, execute
from cl_nscl.store import CannotWrite, Run, content_hash, failure, history, load_checkpoint, load_snapshot, read_stored, save_checkpoint, stored_files, stored_run, train_runs, write_atomic, write_stored
from cl_nscl.train import chosen, setting
from cl_nscl.twins import Diverged

P = Params(dataset="digits", n_train=100, size=8, encoder="resnet8", width=0.25, proj_hidden=16, proj_dim=8, B=25, epochs=4, warmup=1, lr=0.1, flip=0, snapshots=4)
ROOT = Path(__file__).resolve().parent.parent
ARGS = ["--preset", "smoke", "--experiment", "01_alignment", "--set", "objectives=[cl, nscl]", "n_train=100", "size=8", "width=0.25", "B=25", "B_ref=25", "jobs=1"]
twins = lambda folder, *objectives, **kw: [stored_run(dataclasses.replace(P, objective=o, **kw), folder) for o in objectives or ("cl", "nscl")]
whole = lambda runs: [(f.name, (r.path/"history.csv").read_bytes()) for r in runs for f in r.snapshots.values()]


@pytest.fixture(scope="module")
def through(tmp_path_factory):
    "The undisturbed runs."
    runs = twins(tmp_path_factory.mktemp("through"))
    train_runs(runs)
    return runs


def stop_at(step):
    class Stop(Exception): pass
    def report(gained, t, losses):
        if t == step: raise Stop
    return Stop, report


def begun(folder, step, *objectives):
    "Twins that were interrupted after a step, with a checkpoint after each."
    runs, (Stop, report) = twins(folder, *objectives), stop_at(step)
    with pytest.raises(Stop): train_runs(runs, report=report, minutes=0)
    return runs


def quiet(fn, *args, **kw):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fn(*args, **kw)
    return "\n".join(str(w.message) for w in said)


def command(cwd, *argv, **kw):
    return subprocess.run([*kw.pop("before", ()), sys.executable, "-m", "cl_nscl.run", "reproduce", "digits", *ARGS, *argv], cwd=cwd, capture_output=True, text=True, timeout=300, **kw)


# Checkpoints

def cut(f): f.write_bytes(f.read_bytes()[:100])
def empty(f): f.write_bytes(b"")
def flip(f): b = bytearray(f.read_bytes()); b[len(b) // 2] ^= 8; f.write_bytes(b)
def foreign_text(f): f.write_text("not a checkpoint")
def other_kind(f): data = pickle.dumps(3); f.unlink(); f.with_name(f"{f.name[:19]}-{content_hash(data)}.pt").write_bytes(data)
def other_run(f): # whole, and of another run
    other = stored_run(dataclasses.replace(P, tau=0.1), f.parent.parent)
    other.path.mkdir(exist_ok=True)
    new = save_checkpoint(other, dict(read_stored(f), step=int(f.name[11:19])), torch.zeros(1))
    f.unlink(); shutil.copy(new, f.parent)


def changed(**values): # whole, of this run and this step, and not as this version writes it; None: the part is missing
    def damage(f):
        state = {k: v for k, v in (read_stored(f) | values).items() if v is not None}
        f.unlink(); write_stored(f.parent, "checkpoint", 8, state)
    return damage
older, no_names, other_objective, few_losses, path_outside = changed(losses=None), changed(snapshots=[3]), changed(objective="ce"), changed(losses=torch.zeros(2)), changed(snapshots=["../snapshot"])


@pytest.mark.parametrize("damage", [cut, empty, flip, foreign_text, other_kind, other_run, older, no_names, other_objective, few_losses, path_outside],
                         ids="cut empty flip foreign_text other_kind other_run older no_names other_objective few_losses path_outside".split())
def test_R05_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_it_is_used(tmp_path, through, damage):
    runs, steps = begun(tmp_path, 9), []
    damage(stored_files(runs[0].path, "checkpoint")[8])
    assert [*stored_files(runs[1].path, "checkpoint")] == [7, 8]
    said = quiet(train_runs, runs, report=lambda gained, t, losses: steps.append(t))
    assert "checkpoint-00000008" in said and "set aside" in said and [*runs[0].path.glob("*.bad")]
    assert steps[0] == 8                                                    # both go on from step 7, the last that they have in common
    assert whole(runs) == whole(through)


@pytest.mark.parametrize("bad", [dict(optimizer={}), dict(model=dict(w=torch.ones(2)))], ids=["optimizer", "model"])
def test_checkpoints_of_another_version_are_named(tmp_path, bad):
    runs = begun(tmp_path, 9, "cl")
    changed(**bad)(stored_files(runs[0].path, "checkpoint")[8])
    with pytest.raises(UserError, match=f"checkpoints of step 8 in {runs[0].path} do not fit this version of the software .*remove them"): train_runs(runs)


def test_a_lost_snapshot_is_made_again_and_the_run_is_not_done_meanwhile(tmp_path, through):
    runs = twins(tmp_path)
    train_runs(runs)
    cut(runs[0].snapshots[4])
    assert runs[0].done                                                     # nobody has looked yet
    with pytest.warns(UserWarning, match="set aside"), pytest.raises(ValueError, match="will train it again"): load_snapshot(runs[0], 4)
    assert not runs[0].done and not (runs[0].path/"done.json").exists()
    said = quiet(train_runs, runs)
    assert "is not used: snapshot-00000004" in said and whole(runs) == whole(through)
    runs[1].snapshots[8].unlink()                                           # removed by hand
    assert not runs[1].done
    quiet(train_runs, runs)
    assert whole(runs) == whole(through)


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"snapshots": 3}', '{"snapshots": []}', '{"snapshots": [null]}', '{"snapshots": ["params.json"]}', '{"snapshots": ["../snapshot"]}'])
def test_a_damaged_end_mark_is_none_and_the_run_is_finished_again(tmp_path, through, content):
    runs = twins(tmp_path)
    train_runs(runs)
    for r in runs: (r.path/"done.json").write_text(content)
    assert not any(r.done for r in runs) and [*runs[0].snapshots] == [0, 4, 8, 12, 16]
    train_runs(runs)
    assert whole(runs) == whole(through)


def test_a_damaged_record_of_the_data_is_named(tmp_path, through):
    runs = begun(tmp_path, 9)
    (runs[0].path/"data.json").write_text("{")
    for call in (train_runs, lambda runs: train_plan(runs, jobs=1)):
        with pytest.raises(UserError, match=f"{runs[0].path}/data.json: cannot be read .*remove it"): call(runs)
    (runs[0].path/"data.json").unlink()
    train_runs(runs)
    assert whole(runs) == whole(through)


def test_foreign_snapshots_do_not_count(tmp_path, through):
    runs = begun(tmp_path, 9)
    write_stored(runs[0].path, "snapshot", 3, dict(w=torch.ones(2))); shutil.copy(through[1].snapshots[4], runs[0].path)
    train_runs(runs)
    assert whole(runs) == whole(through)
    shutil.copy(through[1].snapshots[4], runs[0].path)
    assert [*runs[0].snapshots] == [0, 4, 8, 12, 16] and whole(runs) == whole(through)


def test_R20_nothing_newer_than_the_checkpoint_stays_in_the_history(tmp_path):
    runs = begun(tmp_path, 9)
    assert len((runs[0].path/"history.csv").read_text().splitlines()) == 3   # two epochs
    for r in runs: [f.unlink() for t, f in stored_files(r.path, "checkpoint").items() if t == 8]
    Stop, report = stop_at(8)
    with pytest.raises(Stop): train_runs(runs, report=report)               # resumes from 7, is stopped before it stores anything
    for r in runs: assert len((r.path/"history.csv").read_text().splitlines()) == 2 and [*stored_files(r.path, "checkpoint")] == [7] and [*r.snapshots] == [0, 4]


def test_killed_between_checkpoint_and_history_at_the_end(tmp_path, through, monkeypatch):
    "The last epoch's row is there although no step was left to make."
    import cl_nscl.store as module
    runs, real = twins(tmp_path), module.write_atomic
    def fails(path, data):
        if path.name == "history.csv" and data.count(b"\n") == 5: raise KeyboardInterrupt
        return real(path, data)
    monkeypatch.setattr(module, "write_atomic", fails)
    with pytest.raises(KeyboardInterrupt): train_runs(runs)
    monkeypatch.setattr(module, "write_atomic", real)
    train_runs(runs)
    assert whole(runs) == whole(through)


@pytest.mark.parametrize("steps", [(3, 9, 9), (5, 6, 14), (15, 0, 2)])
def test_twins_at_different_steps_end_as_one(tmp_path, through, steps):
    for o, step in zip(("cl", "nscl"), steps):
        if step: begun(tmp_path, step, o)
    runs = twins(tmp_path)
    train_runs(runs)
    assert whole(runs) == whole(through)


def test_R05_a_serialiser_that_fails_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    run = stored_run(P, tmp_path)
    run.path.mkdir()
    state = lambda t: dict(step=t, objective="cl", model=dict(w=torch.ones(3)), optimizer={})
    save_checkpoint(run, state(1), torch.zeros(1))
    def half(obj, f): f.write(b"half"); raise RuntimeError("half-way")
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(RuntimeError, match="half-way"): save_checkpoint(run, state(2), torch.zeros(2))
    assert load_checkpoint(run)["step"] == 1 and len([*run.path.iterdir()]) == 1


def test_R03_steps_compare_as_numbers(tmp_path):
    run = stored_run(P, tmp_path)
    run.path.mkdir()
    for t in ("20", "90", "0100", "100"): # by name, 90 would come last
        f = write_stored(run.path, "checkpoint", int(t), dict(step=int(t), run=run.id, objective="cl", model={}, optimizer={}, losses=torch.zeros(int(t)), snapshots=[]))
        f.rename(f.with_name(f.name.replace(f"{int(t):08d}", t)))
    assert [*stored_files(run.path, "checkpoint")] == [20, 90, 100] and load_checkpoint(run)["step"] == 100


@pytest.mark.parametrize("kind", ["checkpoint", "snapshot"])
@pytest.mark.parametrize("bad", [np.float64(2), np.arange(2), Path("x"), {3}])
def test_R07_what_could_not_be_read_back_is_not_written(tmp_path, kind, bad):
    before = write_stored(tmp_path, kind, 2, dict(w=torch.ones(2)))
    with pytest.raises(ValueError, match=rf"{kind} at step 2: \['a'\]\[0\] is a .*, which could not be read back"): write_stored(tmp_path, kind, 2, dict(w=torch.ones(2), a=[bad]))
    assert [*tmp_path.iterdir()] == [before] and read_stored(before)["w"].sum() == 2


def test_R07_R08_checkpoints_hold_what_the_safe_loader_takes_and_random_state_survives(tmp_path, through):
    "No random state is stored, since every stream is named by seed and step; what a caller adds comes back as it was, on the CPU."
    for r in through:
        state = load_checkpoint(r)
        plain = lambda v: isinstance(v, (torch.Tensor, int, float, str, bool, type(None))) or isinstance(v, dict) and all(map(plain, v.values())) or isinstance(v, (list, tuple)) and all(map(plain, v))
        assert plain(state)
    run, g = stored_run(P, tmp_path), torch.Generator().manual_seed(3)
    run.path.mkdir()
    kind, keys, *rest = np.random.RandomState(3).get_state()
    save_checkpoint(run, dict(step=1, objective="cl", model={}, optimizer={}, rng=g.get_state(), numpy=[kind, keys.tolist(), *rest]), torch.zeros(1))
    want, state, n = torch.rand(3, generator=g), load_checkpoint(run), np.random.RandomState()
    assert state["rng"].dtype == torch.uint8 and state["rng"].device.type == "cpu"
    n.set_state((state["numpy"][0], np.array(state["numpy"][1], dtype=np.uint32), *state["numpy"][2:]))
    assert torch.equal(_rand(state["rng"]), want) and n.rand() == np.random.RandomState(3).rand()


def _rand(state):
    g = torch.Generator()
    g.set_state(state)
    return torch.rand(3, generator=g)


class Evil:
    def __reduce__(self): return os.mkdir, ("pwned",)


def test_a_crafted_checkpoint_does_not_run(tmp_path, monkeypatch, through):
    monkeypatch.chdir(tmp_path)
    runs = begun(tmp_path, 9)
    torch.save(dict(step=8, run=runs[0].id, snapshots=[Evil()]), raw := io.BytesIO())
    stored_files(runs[0].path, "checkpoint")[8].unlink()
    (runs[0].path/f"checkpoint-00000008-{content_hash(raw.getvalue())}.pt").write_bytes(raw.getvalue())
    said = quiet(train_runs, runs)
    assert "checkpoint-00000008" in said and not Path("pwned").exists() and whole(runs) == whole(through)


# What a machine runs out of

def mounted(at, *argv):
    done = subprocess.run(["mount", *argv, str(at)], capture_output=True, text=True)
    if done.returncode: pytest.skip(f"cannot mount here: {done.stderr.strip()}")


@contextlib.contextmanager
def small_disk(at, size):
    at.mkdir()
    mounted(at, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")
    try: yield at
    finally: subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_full_disk_is_one_message_and_the_same_call_continues(tmp_path, through):
    with small_disk(tmp_path/"disk", "2m") as disk:
        runs, filler = twins(disk/"runs"), disk/"filler"
        def fill(gained, t, losses):
            if t == 6: # other people's files
                with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
                    while f.write(b"x" * 4096): pass
        with pytest.raises(CannotWrite, match=r"cannot write .*(checkpoint|snapshot)-00000\d\d\d-.*: No space left on device"): train_runs(runs, report=fill, minutes=0)
        assert not [*disk.rglob(".*.tmp")] and all(load_checkpoint(r)["step"] in (5, 6) for r in runs) and not any(r.done for r in runs)
        with pytest.raises(Failed, match="cannot write .*No space left on device"): train_plan(runs, jobs=1)    # in a process of its own: one line
        filler.unlink()
        train_runs(runs)
        assert whole(runs) == whole(through)


def test_a_file_that_may_not_grow_is_named(tmp_path):
    "RLIMIT_FSIZE: as a quota or a full disk, where nothing can be mounted."
    code = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))\nfrom test_faults import *\ntrain_runs(twins(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-B", "-c", code, tmp_path/"runs"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}/tests{os.pathsep}{ROOT}"})
    assert "CannotWrite: cannot write" in done.stderr.splitlines()[-1] and "File too large" in done.stderr.splitlines()[-1]
    assert not [*tmp_path.rglob(".*.tmp")] and not [*tmp_path.rglob("done.json")]


def test_a_read_only_folder_is_one_line_and_exit_code_1(tmp_path):
    (tmp_path/"runs").mkdir()
    mounted(tmp_path/"runs", "-t", "tmpfs", "-o", "ro", "tmpfs")
    try: done = command(tmp_path)
    finally: subprocess.run(["umount", "-l", str(tmp_path/"runs")], check=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Read-only file system" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not (tmp_path/"results/digits/01_alignment.json").exists()


def test_results_that_cannot_be_written_are_refused_before_anything_trains(tmp_path):
    at = tmp_path/"results/digits"
    at.mkdir(parents=True)
    mounted(at, "-t", "tmpfs", "-o", "ro", "tmpfs")
    try: done = command(tmp_path)
    finally: subprocess.run(["umount", "-l", str(at)], check=True)
    at.rmdir(); at.write_text("a file")
    for d in (done, command(tmp_path)): assert d.returncode and "results/digits" in d.stderr and len(d.stderr.strip().splitlines()) == 1 and not (tmp_path/"runs").exists(), d.stderr


def test_without_permission_one_line_and_exit_code_1(tmp_path):
    "Without the right of root to ignore permissions."
    if os.geteuid() or not shutil.which("setpriv"): pytest.skip("needs root and setpriv")
    (tmp_path/"runs").mkdir(mode=0o555)
    done = command(tmp_path, before=["setpriv", "--bounding-set=-dac_override,-dac_read_search"])
    assert done.returncode == 1 and "Permission denied" in done.stderr and "runs" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and not [*(tmp_path/"runs").iterdir()]


def test_out_of_memory_in_a_training_process_is_said_and_the_same_call_continues(tmp_path, monkeypatch, through):
    "An address space that ends while it trains."
    plugin = tmp_path/"limit.py"
    plugin.write_text("import resource\nfrom dataclasses import replace\nfrom cl_nscl.losses import OBJECTIVES\nfrom pathlib import Path\nimport torch\n"
                      "def hungry(out, y, tau, pairs):\n    if Path(__file__).with_name('limit').exists(): torch.empty(2**45)\n    return OBJECTIVES['cl'].fn(out, y, tau, pairs)\n"
                      "OBJECTIVES['hungry'] = replace(OBJECTIVES['cl'], fn=hungry)\n")
    (tmp_path/"limit").touch()
    run = stored_run(dataclasses.replace(P, objective="hungry", plugins=(str(plugin),)), tmp_path/"runs")
    with pytest.raises(Failed, match=r"hungry \(seed 0\): out of memory; fewer jobs at a time need less.*log: .*log.txt"): train_plan([run], jobs=1)
    assert "out of memory" in failure(run) and load_checkpoint(run)["step"] == 0
    (tmp_path/"limit").unlink()
    assert train_plan([run], jobs=1) == 1 and [f.name for f in run.snapshots.values()] == [f.name for f in through[0].snapshots.values()] and not failure(run)


def test_a_training_process_that_is_killed_is_said_and_the_others_go_on(tmp_path):
    "As the kernel kills when memory ends: signal 9."
    plugin = tmp_path/"dies.py"
    plugin.write_text("import os\nfrom dataclasses import replace\nfrom cl_nscl.losses import OBJECTIVES\n"
                      "def dies(out, y, tau, pairs): os.kill(os.getpid(), 9)\nOBJECTIVES['dies'] = replace(OBJECTIVES['cl'], fn=dies)\n")
    bad, good = stored_run(dataclasses.replace(P, objective="dies", plugins=(str(plugin),)), tmp_path/"runs"), twins(tmp_path/"runs", "cl")[0]
    with pytest.raises(Failed, match=r"1 of 2 groups of runs failed.*\n  dies \(seed 0\): killed by signal 9, out of memory\? \(log: "): train_plan([bad, good], jobs=1)
    assert good.done and not bad.done and failure(bad).startswith("killed by signal 9")


DEADLY = """
import os
from pathlib import Path
from torch.utils.data import get_worker_info
import cl_nscl.images as images
real = images.decode
def decode(*args):
    if get_worker_info() and Path(__file__).with_name('deadly').exists(): os.kill(os.getpid(), 9)
    return real(*args)
images.decode = decode
"""


@pytest.fixture
def streamed(tmp_path, monkeypatch):
    "A folder of pictures, a plugin under which the processes that decode them are killed, and the settings of a study of both."
    monkeypatch.setattr(images, "decode", images.decode) # what the plugin puts there, in this process too, ends with the test
    for split, k in ((split, k) for split in ("train", "test") for k in range(8)):
        (at := tmp_path/"photos"/split/"ab"[k % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 20 * k, np.uint8)).save(at/f"{k}.png")
    (tmp_path/"plugin.py").write_text(DEADLY)
    (tmp_path/"deadly").touch()
    return ["folder", "--preset", "smoke", "--objective", "cl", "--set", f"root={tmp_path/'photos'}", "stream=yes", "workers=1", "B=4", "B_ref=4", "batch_sizes=[4, 8]", "n_train=0", "classes=[]",
            "epochs=1", "snapshots=1", "width=0.25", f"plugins=[{tmp_path/'plugin.py'}]", f"runs={tmp_path/'runs'}"]


def test_a_dead_process_that_decodes_is_one_line_and_the_same_command_continues(tmp_path, streamed):
    "In the command's own process, and in one of a plan."
    train = lambda: subprocess.run([sys.executable, "-m", "cl_nscl.run", "train", *streamed], capture_output=True, text=True, timeout=120)
    done = train()
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("cl-nscl train: a process that decodes images was killed, out of memory? Fewer of them need less (parameter workers)")
    [run] = chosen(study(layered("folder", "smoke", **dict(map(setting, streamed[6:])))), ["cl"])
    with pytest.raises(Failed, match=r"cl \(seed 0\): a process that decodes images was killed.*\(log: "): train_plan([run], jobs=1)
    assert not run.done
    (tmp_path/"deadly").unlink()
    assert train().returncode == 0 and run.done


def test_a_learning_rate_that_diverges_takes_no_twin_with_it(tmp_path):
    "For real: nothing is patched. CE's head overflows at this rate, the losses on the sphere do not."
    runs = twins(tmp_path, "cl", "ce", lr=1e18, clip=0., weight_decay=0.)
    try: train_runs(runs)
    except Exception as e: said = str(e)
    states = [r.done for r in runs]
    assert not all(states) and "at step" in said and "last good checkpoint" in said
    for r, ok in zip(runs, states): assert (r.p.objective in said) == (not ok) and load_checkpoint(r) is not None
    for r in runs:
        for w in (w for t in r.snapshots for w in load_snapshot(r, t).values()): assert torch.isfinite(w.float()).all()


def test_what_a_library_prints_while_it_is_imported_is_no_answer(tmp_path, monkeypatch):
    "Whatever a training process says on its standard output before its first task."
    (tmp_path/"sitecustomize.py").write_text("import os\nos.write(1, b'welcome\\nended badly\\nno end of line')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    assert train_plan(twins(tmp_path/"runs", "cl"), jobs=1) == 1


def test_an_interrupt_leaves_no_process_behind_even_while_others_start(tmp_path, monkeypatch):
    "Every second start of a process is slow; the interrupt comes in between."
    import cl_nscl.plan as module
    started, real = [], module._started
    def slow(threads):
        if started: time.sleep(0.5)
        started.append(real(threads))
        return started[-1]
    monkeypatch.setattr(module, "_started", slow)
    monkeypatch.setattr(module, "_ask", lambda process, *args: process.wait() and "")
    threading.Timer(0.8, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt): module._run_tasks([[r] for r in twins(tmp_path, "cl", "nscl", "scl")], 3, "cpu", 1, module.Progress(1, "x"))
    assert started and all(p.poll() is not None for p in started)


def test_a_run_that_diverges_before_its_first_checkpoint_says_so(tmp_path, monkeypatch):
    import cl_nscl.store as module
    monkeypatch.setattr(module, "_store", lambda *_: None)                  # as on another machine, before its disk shows the file
    with pytest.raises(Diverged, match="last good checkpoint: none"): train_runs(twins(tmp_path, "cl", lr=1e30, clip=0.))


def test_a_strangers_repository_is_no_origin_of_a_result(tmp_path):
    "The package, installed below another git repository: no commit rather than a wrong one."
    for argv in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "theirs"]): subprocess.run(["git", *argv], cwd=tmp_path, check=True)
    shutil.copytree(ROOT/"cl_nscl", tmp_path/"env/cl_nscl", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run([sys.executable, "-c", "import cl_nscl.store as s; print(s.__file__); print(repr(s.provenance()['commit']))"], cwd=tmp_path/"env", capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path/"env")})
    assert done.stdout.splitlines() == [str(tmp_path/"env/cl_nscl/store.py"), "''"], done.stderr


# Two processes and one run

HOLD = "from test_faults import *\nfrom cl_nscl.store import locked\nwith locked(twins(sys.argv[1])): print('held', flush=True); time.sleep(float(sys.argv[2]))"


def hold(folder, seconds):
    p = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}/tests{os.pathsep}{ROOT}"})
    assert p.stdout.readline() == "held\n"
    return p


def test_the_second_process_says_who_trains_and_waits_and_a_dead_ones_lock_is_taken_over(tmp_path, through):
    first, out = hold(tmp_path, 600), io.StringIO()
    def kill(): # the one that holds the lock, as soon as the other one waits for it
        while "waiting for it" not in out.getvalue(): time.sleep(0.1)
        first.kill()
    threading.Thread(target=kill, daemon=True).start()
    with contextlib.redirect_stdout(out): assert train_plan(twins(tmp_path), jobs=1) == 2   # in a process of its own, whose words come through
    assert f"is being trained by process {first.pid} on {platform.node()}; waiting for it" in out.getvalue() and whole(twins(tmp_path)) == whole(through)


def test_two_processes_train_each_run_once(tmp_path, through):
    code = "from test_faults import *\nmade = []\ntrain_runs(twins(sys.argv[1]), report=lambda gained, t, losses: made.append(t))\nprint(len(made))"
    both = [subprocess.Popen([sys.executable, "-c", code, tmp_path/"runs"], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}/tests{os.pathsep}{ROOT}"}) for _ in range(2)]
    assert sorted(int(p.communicate(timeout=120)[0].splitlines()[-1]) for p in both) == [0, 16]
    assert whole(twins(tmp_path/"runs")) == whole(through)


# Notebooks

def notebook(path, *cells, kernel="python3"):
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c, id=f"c{i}") for i, c in enumerate(cells)], metadata=dict(kernelspec=dict(name=kernel, display_name="x", language="python")))
    nb.cells[0].metadata["tags"] = ["parameters"]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nb, path)
    return path


SAVE = """import json, pathlib
o = pathlib.Path(out)
for f in ("good.csv", "good.md"): (o/f).touch()
(o/"01_x.json").write_text(json.dumps(dict(name="01_x", files=["good.csv", "good.md"])))""" # as save_results leaves them


@pytest.mark.parametrize("end, says", [("raise ValueError('no')", "failed in cell .: ValueError: no"), ("raise ValueError('no\\n' * 10**5)", r"failed in cell .: ValueError: (no ){9}[no ]{273} \(see [^\n]*\)$"), ("import os; os.kill(os.getpid(), 9)", "DeadKernelError"), ("import time; time.sleep(600)", "longer than cell_minutes")])
def test_N05_a_failing_dying_or_hanging_notebook_leaves_no_result(tmp_path, end, says):
    "Even one that had already written all of its results; what it left lies apart and is marked, and an earlier result is gone."
    from cl_nscl.report import load_results
    out = tmp_path/"out"
    path = notebook(tmp_path/"01_x.ipynb", f"out = {str(out)!r}", SAVE, end)
    out.mkdir(); (out/"old.csv").touch(); write_atomic(out/"01_x.json", json.dumps(dict(name="01_x", files=["old.csv"])).encode()); (out/"01_x.ipynb").touch(); (out/"other.csv").touch()
    with pytest.raises(NotebookFailed, match=says): execute(path, {}, out, minutes=0.1 if "sleep" in end else 0)
    assert sorted(p.name for p in out.iterdir()) == ["failed", "other.csv"] and load_results(out) == []
    assert {"01_x.ipynb", "01_x.json", "good.csv", "good.md"} <= {p.name for p in (out/"failed").iterdir()}
    assert "failed" in nbformat.read(out/"failed/01_x.ipynb", 4).metadata["cl_nscl"]
    notebook(path, f"out = {str(out)!r}", SAVE)
    execute(path, {}, out)
    assert [m["name"] for m in load_results(out)] == ["01_x"] and not [*(out/"failed").iterdir()]


@pytest.mark.parametrize("cell, says", [("bs = 256\nlr = 0.3 * bs / 256", "line 2 of the parameters cell is 'lr = 0.3"), ("bs = 256; lr = 0.3 * bs / 256", "line 1 .* 'lr ="),
                                        ("import math\nbs = 256", "line 1 .* 'import math'"), ("bs, lr = 1, 2", "line 1 .* each must give"), ("bs = (", "line 1 of the parameters cell is not Python")])
def test_N03_a_value_that_is_computed_among_the_parameters_is_refused(tmp_path, cell, says):
    "With bs = 1024 injected below, lr would stay what 256 makes of it."
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell, metadata=dict(tags=["parameters"]))], metadata=dict(kernelspec=dict(name="python3", language="python", display_name="x")))
    nbformat.write(nb, tmp_path/"a.ipynb")
    with pytest.raises(UserError, match=f"a.ipynb: .*{says}"): execute(tmp_path/"a.ipynb", dict(bs=1024), tmp_path)


def test_N07_a_notebook_without_a_kernel_is_named(tmp_path):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("bs = 1", metadata=dict(tags=["parameters"]))]), tmp_path/"a.ipynb")
    with pytest.raises(UserError, match="a.ipynb: names no kernel"): execute(tmp_path/"a.ipynb", dict(bs=2), tmp_path)


def test_N07_any_kernel_name_runs_under_this_interpreter(tmp_path):
    done = execute(notebook(tmp_path/"a.ipynb", "x = 1", "import sys; print(sys.executable)", kernel="my_conda_env"), {}, tmp_path/"out")
    assert nbformat.read(done, 4).cells[-1].outputs[0].text.strip() == sys.executable.replace(sys.prefix, "python") # and no path of this machine is stored


def kernels(): # of this process
    found = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True).stdout
    return found.count("ipykernel_launcher")


def test_N08_ten_studies_at_once_do_not_disturb_one_another(tmp_path):
    "Ten at a time from ten threads, each into its own folder, twice; every kernel's answer is its own, and none is left behind."
    path = notebook(tmp_path/"a.ipynb", "n = 0", "import time; time.sleep(0.2); print(n)")
    for again in range(2):
        with ThreadPoolExecutor(10) as pool: made = [*pool.map(lambda n: execute(path, dict(n=n), tmp_path/f"out{again}{n}"), range(10))]
        assert [nbformat.read(p, 4).cells[-1].outputs[0].text for p in made] == [f"{n}\n" for n in range(10)]
    assert kernels() == 0


def test_a_study_goes_on_after_a_notebook_that_fails(tmp_path, monkeypatch, capsys):
    import cl_nscl.run as module
    from cl_nscl.plan import layered, study
    s = study(layered("digits", "smoke", out=str(tmp_path), runs=str(tmp_path/"runs"), cell_minutes=1))
    for name, last in (("07_bounds", "raise ValueError('no')"), ("99_paper", "1")): notebook(tmp_path/f"nb/{name}.ipynb", "\n".join(f"{k} = {v!r}" for k, v in module.study_values(s).items()), last)
    monkeypatch.setattr(module, "shipped", lambda kind: tmp_path/"nb")
    with pytest.raises(module.Incomplete, match="07_bounds.ipynb failed in cell .*ValueError: no"): module.reproduce(module.study_values(s), ["07_bounds", "99_paper"])
    assert (tmp_path/"digits/99_paper.ipynb").exists() and (tmp_path/"digits/failed/07_bounds.ipynb").exists() and "07_bounds.ipynb failed" in (tmp_path/"digits/summary.html").read_text()


def test_two_studies_that_write_to_one_folder_take_turns(tmp_path, capsys):
    from cl_nscl.run import _alone_in
    entered = []
    def study(n):
        with _alone_in(tmp_path/"digits"): entered.append(n); time.sleep(0.5); entered.append(n)
    with ThreadPoolExecutor(3) as pool: [*pool.map(study, range(3))]
    assert entered[::2] == entered[1::2] and "another process writes to" in capsys.readouterr().out
