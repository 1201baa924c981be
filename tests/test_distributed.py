"""One run on many processes is the run on one: real gloo processes, tiny models."""
import contextlib, dataclasses, json, os, subprocess, sys, tempfile, time
from datetime import timedelta
from pathlib import Path

import pandas as pd, pytest, torch, torch.distributed as dist, torch.multiprocessing as mp
from PIL import Image
from torch import nn

from cl_nscl import store
from cl_nscl.core import Params, UserError
from cl_nscl.data import Stream
from cl_nscl.distributed import from_main, gather, gather_rows, global_batch_norm, is_main, local_device, my_rows, rank, replicated, share
from cl_nscl.losses import cl_loss
from cl_nscl.store import stored_run, train_runs
from cl_nscl.twins import Diverged, Twins, all_features, dataset_of, twin_batch, twin_images, twin_step

ALL = ("cl", "ntxent", "nscl", "scl", "ce")
P = Params(dataset="digits", n_train=100, size=8, encoder="resnet8", width=0.5, proj_hidden=16, proj_dim=8, B=24, epochs=5, warmup=1, lr=0.02, flip=0, snapshots=2)
DS = dataset_of(P)
TIMEOUT = timedelta(minutes=10) # that one process waits for the others
run = lambda o, **kw: dataclasses.replace(P, objective=o, **kw)


def _child(r, W, folder, fn, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=r, world_size=W, timeout=TIMEOUT)
    try: torch.save(fn(*args), f"{folder}/{r}.pt")
    finally: dist.destroy_process_group()


def together(W, fn, *args):
    "What `fn(*args)` returns on each of `W` processes; all of them end within 30 seconds of one another's failure."
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_child, (W, folder, fn, args), nprocs=W, start_method="fork")
        return [torch.load(f"{folder}/{r}.pt", weights_only=False) for r in range(W)]


def says(fn, kind=ValueError):
    "The message of the error that `fn` raises, and the seconds that it took."
    start = time.time()
    try: fn()
    except kind as e: return str(e), time.time() - start
    return "no error", time.time() - start


def exact(objectives, norm=True, **kw):
    "Twins in float64, where rounding cannot hide or make a difference; maybe without batch norm."
    tw = Twins([run(o, **kw) for o in objectives], DS)
    for m in tw.models:
        if not norm:
            for b in [*m.modules()]:
                for name, child in b.named_children():
                    if isinstance(child, nn.modules.batchnorm._BatchNorm): setattr(b, name, nn.Identity())
        m.double().register_forward_pre_hook(lambda m, args: (args[0].double(),))
    tw.nets = [replicated(m) for m in tw.models]
    return tw


def steps(n, objectives=ALL, norm=True, **kw):
    "Losses of n steps, the gradients of the last and the weights after it."
    tw = exact(objectives, norm, **kw)
    losses = torch.stack([twin_step(tw) for _ in range(n)])
    return losses, [{k: w.grad for k, w in m.named_parameters() if w.grad is not None} for m in tw.models], [m.state_dict() for m in tw.models]


def largest(a, b): return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


# --- the gather

def linear_dcl():
    torch.manual_seed(0)
    net, x = nn.Linear(6, 4), torch.randn(2, 8, 6)
    rep = replicated(net)
    mine = x[:, share(torch.arange(8))]
    cl_loss(gather(rep(mine))).backward()
    return net.weight.grad


def test_P01_gradient_through_the_gather_has_the_right_scale():
    with torch.random.fork_rng(): one = linear_dcl()
    for g in together(2, linear_dcl): assert ((g / one - 1).abs() < 1e-5).all()


def order_of_rows():
    x = torch.arange(24.).view(2, 6, 2)
    whole = gather(x[:, share(torch.arange(6))])
    h = torch.arange(7.)[:, None]
    return whole.equal(x), gather_rows(h[my_rows(7)], 7).equal(h), share(torch.arange(6)).tolist()


@pytest.mark.parametrize("W", [2, 3])
def test_gathered_rows_are_in_the_order_of_the_batch(W):
    got = together(W, order_of_rows)
    assert all(a and b for a, b, _ in got) and sorted(i for *_, mine in got for i in mine) == [*range(6)]


# --- the step

@pytest.mark.parametrize("W", [2, 4])
def test_loss_and_gradient_of_every_objective_are_those_of_one_process(W):
    "Batch norm included: its statistics are those of all processes' images."
    (la, ga, wa), (lb, gb, wb) = steps(2), together(W, steps, 2)[W - 1]
    assert (la - lb).abs().max() < 1e-6
    for a, b, p, q in zip(ga, gb, wa, wb): assert a.keys() == b.keys() and largest(a, b) < 1e-5 and largest(p, q) < 1e-6


def float32(norm):
    tw = Twins([run(o) for o in ALL], DS)
    if not norm:
        tw = exact(ALL, False)
        for m in tw.models: m.float(); m._forward_pre_hooks.clear()
        tw.nets = [replicated(m) for m in tw.models]
    loss = twin_step(tw)
    return loss, [{k: w.grad for k, w in m.named_parameters()} for m in tw.models]


def test_without_batch_norm_float32_is_equal_too_and_with_it_rounding_differs():
    "torch's own batch norm sums in float32; the processes' sums are in float64. The loss agrees; gradients differ by its rounding."
    two = together(2, lambda: (float32(False), float32(True)))[0]
    (la, ga), (lb, gb) = float32(False), two[0]
    assert (la - lb).abs().max() < 2e-6 and max(largest(a, b) for a, b in zip(ga, gb)) < 1e-5
    (la, ga), (lb, gb) = float32(True), two[1]
    assert (la - lb).abs().max() < 5e-6 and max(largest(a, b) for a, b in zip(ga, gb)) < 0.05


@pytest.mark.parametrize("W", [2, 4])
def test_weights_are_equal_on_all_ranks_after_20_steps(W):
    got = together(W, lambda: [m.state_dict() for tw in [Twins([run("cl"), run("ce")], DS)] for _ in [[twin_step(tw) for _ in range(20)]] for m in tw.models])
    for other in got[1:]:
        for a, b in zip(got[0], other): assert all(torch.equal(a[k], b[k]) for k in a)


def my_batches():
    tw = Twins([run("cl")], DS)
    return [(*twin_images(tw, t), twin_batch(tw, t)[0]) for t in (0, 1, 5)]


def test_views_and_batches_are_those_of_one_process():
    one, parts = my_batches(), together(2, my_batches)
    for r, got in enumerate(parts):
        for (x, u, y, v), (xr, ur, yr, vr) in zip(one, got):
            assert torch.equal(x[r::2], xr) and torch.equal(u[r::2], ur) and torch.equal(y, yr) and torch.equal(v[:, r::2], vr)


def streamed_batches():
    images = [Image.fromarray(x[0].numpy()) for x in DS.train.x]
    tw = Twins([run("cl")], dataclasses.replace(DS, train=Stream(images.__getitem__, DS.train.y, torch.arange(len(images)), 1, P.size)))
    return [twin_batch(tw, t) for t in (0, 1, 6, 2)]


def test_streamed_batches_are_those_of_one_process():
    one, parts = streamed_batches(), together(2, streamed_batches)
    for r, got in enumerate(parts):
        for (v, y), (vr, yr) in zip(one, got): assert torch.equal(v[:, r::2], vr) and torch.equal(y, yr)


@pytest.mark.parametrize("norm", [True, False])
def test_gradient_caching_on_two_processes(norm):
    "The chunks are the same images, so that even batch norm sees the same."
    (la, ga, wa), (lb, gb, wb) = steps(2, ALL, norm, chunk=8), together(2, steps, 2, ALL, norm)[0] if not norm else together(2, chunked)[0]
    assert (la - lb).abs().max() < 1e-9
    for a, b in zip(ga, gb): assert largest(a, b) < 1e-8


def chunked(): return steps(2, ALL, True, chunk=8)


# --- batch norm

def norms():
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4, 4, dtype=torch.float64) + torch.arange(6.).view(6, 1, 1, 1)
    net, plain = nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5)).double(), nn.BatchNorm2d(5).double()
    names = [*net.state_dict()]
    rep = replicated(global_batch_norm(net, "cpu"))
    out = rep(x[share(torch.arange(6))])
    (gather(out[None]).square() * torch.arange(6.).view(1, 6, 1, 1, 1)).sum().backward()
    on_gpu = {type(m).__name__ for m in global_batch_norm(nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(3))), "cuda").modules()}
    alone = plain(x[share(torch.arange(6))])
    return dict(grad=net[0].weight.grad, mean=net[1].running_mean, var=net[1].running_var, n=net[1].num_batches_tracked), [*net.state_dict()] == names, on_gpu, alone.detach()


def test_P06_batch_norm_sees_the_images_of_all_processes():
    with torch.random.fork_rng(): one, _, _, whole = norms()
    for r, (two, same_names, on_gpu, alone) in enumerate(together(2, norms)):
        assert all((one[k] - two[k]).abs().max() < 1e-10 for k in one) and same_names and "SyncBatchNorm" in on_gpu and "BatchNorm2d" not in on_gpu
        assert (alone - whole[r::2]).abs().max() > 0.1              # what per-process statistics would have given


def two_forwards():
    torch.manual_seed(0)
    net = global_batch_norm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double(), "cpu")
    rep, x = replicated(net), torch.randn(2, 8, 4, dtype=torch.float64)
    mine = x[:, share(torch.arange(8))]
    z = torch.stack([rep(mine[0]), rep(mine[1])])
    cl_loss(gather(z)).backward()
    return [w.grad for w in net.parameters()]


def test_P04_two_forward_passes_before_one_backward():
    with torch.random.fork_rng(): one = two_forwards()
    for two in together(2, two_forwards): assert all((a - b).abs().max() < 1e-10 for a, b in zip(one, two))


def test_P08_every_parameter_has_a_gradient_so_none_is_looked_for():
    def grads():
        tw = Twins([run("ce"), run("cl")], DS)
        twin_step(tw)
        return [all(w.grad is not None for w in m.parameters()) for m in tw.models], [n.find_unused_parameters for n in tw.nets]
    assert together(2, grads) == [([True, True], [False, False])] * 2


# --- refusals: on all ranks, without a hang

def unequal(): return says(lambda: gather(torch.randn(2, 5 - rank(), 3)))
def mixed(): return says(lambda: gather(torch.randn(2, 4, 3, dtype=torch.float64 if rank() else torch.float32)))
def odd_share(): return says(lambda: Twins([run("cl", B=25)], DS))
def odd_chunk(): return says(lambda: Twins([run("cl", chunk=9)], DS))
def other_data(): return says(lambda: Twins([run("cl")], dataset_of(dataclasses.replace(P, n_train=100 + 10 * rank()))))
def other_run(): return says(lambda: Twins([run("cl", tau=0.5 + rank())], DS))
def nan_on_one():
    tw = Twins([run("cl")], DS)
    if not is_main(): tw.nets[0].register_forward_hook(lambda m, a, out: (out[0], out[1] * float("nan")))
    return says(lambda: twin_step(tw), Diverged)
def failing_main():
    def fail(): raise UserError("the disk is full")
    return says(lambda: from_main(fail))


@pytest.mark.parametrize("fn, text", [
    (unequal, "processes disagree on shape and type of their share of a batch: ((2, 5, 3), 'torch.float32') on 0, ((2, 4, 3), 'torch.float32') on 1"),
    (mixed, "((2, 4, 3), 'torch.float32') on 0, ((2, 4, 3), 'torch.float64') on 1"),
    (odd_share, "parameter B = 25: cannot be shared by 2 processes"), (odd_chunk, "parameter chunk = 9: cannot be shared by 2 processes"),
    (other_data, "processes disagree on the data set"), (other_run, "processes disagree on the runs to train"),
    (nan_on_one, "the outputs of cl became nan at step 0"), (failing_main, "the disk is full")])
def test_P05_what_cannot_be_is_refused_on_all_ranks_without_a_hang(fn, text):
    for message, seconds in together(2, fn): assert text in message and seconds < 30


# --- evaluation

def rows():
    tw = Twins([run("cl")], DS)
    return all_features(tw.models[0], DS.test, tw.spec, chunk=50)


@pytest.mark.parametrize("W", [2, 4])
def test_evaluation_rows_are_there_once_and_in_order(W):
    assert len(DS.test) % 4 == 3                                      # no share is like the others
    one = rows()
    for h in together(W, rows): assert h.shape == one.shape and (h - one).abs().max() < 1e-5


# --- files

def trains(folder, stop=None, objectives=("cl", "nscl")):
    "Train, maybe interrupted after some step; who wrote, and with how many processes."
    wrote, write = [], store.write_atomic
    store.write_atomic = lambda path, data: (wrote.append(path.name), write(path, data))[1]
    class Stop(Exception): pass
    def report(gained, t, losses):
        if t == stop: raise Stop
    try:
        with contextlib.suppress(Stop): train_runs([stored_run(run(o), folder) for o in objectives], report=report)
    finally: store.write_atomic = write
    return wrote


def test_P09_one_process_writes_and_a_run_moves_between_one_and_two_processes(tmp_path):
    runs = lambda d: [stored_run(run(o), tmp_path/d) for o in ("cl", "nscl")]
    train_runs(runs("one"))
    main, other = together(2, trains, tmp_path/"two")
    assert {"done.json", "history.csv"} <= {*main} and other == []
    together(2, trains, tmp_path/"2to1", 13); trains(tmp_path/"2to1")
    trains(tmp_path/"1to2", 13); together(2, trains, tmp_path/"1to2")
    together(2, trains, tmp_path/"2to2", 13); together(2, trains, tmp_path/"2to2")
    T = runs("one")[0].p.epochs * 4
    for d, first, W in (("two", 0, 2), ("2to1", T // 2, 1), ("1to2", T // 2, 2), ("2to2", T // 2, 2)):
        for a, b in zip(runs("one"), runs(d)):
            assert a.id == b.id and b.done and [*b.snapshots] == [0, T // 2, T]
            done = json.loads((b.path/"done.json").read_text())
            assert (done["first_step"], done["world"]) == (first, W)
            x, y = (pd.read_csv(r.path/"history.csv") for r in (a, b))
            assert x.step.tolist() == y.step.tolist() and (x.loss - y.loss).abs().max() < 0.02       # rounding, grown over 20 steps
    for a, b in zip(runs("two"), runs("2to2")): assert [f.name for f in a.snapshots.values()] == [f.name for f in b.snapshots.values()]  # bit for bit


def waits(folder):
    said = []
    train_runs([stored_run(run("cl"), folder)], say=said.append)
    return said


def test_a_run_that_somebody_else_trains_is_waited_for_by_all_processes(tmp_path, monkeypatch):
    "For longer than a process waits for another one's word."
    r = stored_run(run("cl"), tmp_path)
    r.path.mkdir()
    monkeypatch.setattr(sys.modules[__name__], "TIMEOUT", timedelta(seconds=5))
    code = f"import time\nfrom filelock import FileLock\nwith FileLock({str(r.path/'.lock')!r}): print('held', flush=True); time.sleep(14)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as holds:
        assert holds.stdout.readline() == "held\n"
        main, other = together(2, waits, tmp_path)
    assert r.done and len(main) == 1 and main[0].endswith("waiting for it") and other == []


def test_P09_each_process_takes_the_gpu_of_its_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3"); monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_device("cuda") == "cuda:3" and local_device("cpu") == "cpu"
    with pytest.raises(UserError, match="several processes would share one GPU"): local_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="process 3 of this machine has no GPU: there are 2"): local_device("cuda")


# --- the command, under torchrun

def torchrun(W, *args, cwd):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(W), "-m", "cl_nscl.train", *args], cwd=cwd, env=env,
                          capture_output=True, text=True, timeout=200)


def test_torchrun_trains_runs_that_reproduce_finds(tmp_path):
    settings = ["digits", "--preset", "smoke", "--set", "steps=4", "snapshots=1", "objectives=[cl, nscl]"]
    done = torchrun(2, *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [l.split()[1] for l in lines] == ["cl", "nscl"] and done.stderr.count("training cl, nscl on 2 processes: 100 %") == 1
    assert done.stderr.count("batch norm sees the images of all processes") == 1
    assert all(json.loads((tmp_path/l.split()[2]/"done.json").read_text())["world"] == 2 for l in lines)
    found = subprocess.run([sys.executable, "-m", "cl_nscl.run", "reproduce", *settings, "--experiment", "01_alignment", "--dry-run"], cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "2 runs, all of them there: nothing to train", found.stdout + found.stderr


def test_torchrun_says_a_mistake_once(tmp_path):
    done = torchrun(2, "digits", "--preset", "smoke", "--set", "B=25", cwd=tmp_path)
    assert done.returncode != 0 and done.stderr.count("cl-nscl train: parameter B = 25: cannot be shared by 2 processes") == 1


SICK = """
import os
from dataclasses import replace
import torch
from cl_nscl.losses import OBJECTIVES
def memory(): torch.empty(2**45)
def value(): raise ValueError("sick")
def sick(out, y, tau, pairs):
    if os.environ["RANK"] == "1": {what}()
    return OBJECTIVES["cl"].fn(out, y, tau, pairs)
OBJECTIVES["sick"] = replace(OBJECTIVES["cl"], fn=sick)
"""


@pytest.mark.parametrize("code, says", [(SICK.format(what="memory"), "out of memory; fewer jobs at a time need less"), (SICK.format(what="value"), "sick"),
                                        ("import os\nif os.environ['RANK'] == '1': raise OSError('a folder that is not here')", "plugin 'sick.py': cannot be imported (OSError: a folder that is not here)")],
                         ids=["memory", "value", "import"])
def test_torchrun_says_in_one_line_what_happened_to_one_process_alone(tmp_path, code, says):
    "To the one that does not speak otherwise; the main one, which only lost the other, says nothing."
    (tmp_path/"sick.py").write_text(code)
    done = torchrun(2, "digits", "--preset", "smoke", "--objective", "sick" if "sick(" in code else "cl", "--set", "plugins=[sick.py]", "steps=4", cwd=tmp_path)
    said = [line for line in done.stderr.splitlines() if line.startswith("cl-nscl train")]
    assert done.returncode != 0 and len(said) == 1 and said[0].startswith(f"cl-nscl train, process 1: {says}"), done.stderr
    assert "by peer" not in done.stderr, done.stderr


def test_the_number_of_threads_is_the_studys(tmp_path):
    "Whatever torch would take: the run is the one that reproduce would have trained."
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for threads in (1, 2):
        settings = ["digits", "--preset", "smoke", "--objective", "cl", "--set", "steps=1", "snapshots=1", f"threads={threads}", f"runs=runs{threads}"]
        done = subprocess.run([sys.executable, "-m", "cl_nscl.run", "train", *settings], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert json.loads((tmp_path/done.stdout.split()[2]/"done.json").read_text())["threads"] == threads, done.stderr


def test_who_reads_only_the_first_lines_is_not_told_off(tmp_path):
    done = subprocess.run(f"{sys.executable} -m cl_nscl.run params digits | head -1; echo ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines()[1] in ("0", "141") and done.stdout.startswith("dataset") and done.stderr == ""


# --- twins in processes of their own: no communication at all

def test_twin_parallel_is_lockstep_to_the_last_bit(tmp_path):
    from cl_nscl.plan import tasks, train_plan
    runs = lambda d: [stored_run(run(o), tmp_path/d) for o in ("cl", "nscl", "ce")]
    assert sorted([r.p.objective for r in g] for g in tasks(runs("apart"), 3)) == [["ce"], ["cl"], ["nscl"]]
    train_runs(runs("together"))
    train_plan(runs("apart"), jobs=3)
    for a, b in zip(runs("together"), runs("apart")):
        assert b.done and [f.name for f in a.snapshots.values()] == [f.name for f in b.snapshots.values()]
        assert (a.path/"history.csv").read_bytes() == (b.path/"history.csv").read_bytes()
