"""Studies on a real Slurm of one node, started for these tests: waiting, detaching, requeues, time limits, lost and failed jobs."""
import dataclasses, json, os, subprocess, sys, time
from pathlib import Path

import pandas as pd, pytest

import slurm as local_slurm
from cl_nscl import cluster
from cl_nscl.core import Params, UserError
from cl_nscl.plan import Failed, layered, plan, study
from cl_nscl.run import main
from cl_nscl.store import failure, locked, stored_files, stored_run, train_runs
from conftest import need

P = Params(dataset="digits", n_train=100, size=8, encoder="resnet8", width=0.25, proj_hidden=16, proj_dim=8, B=25, epochs=12, warmup=1, lr=0.1, flip=0, snapshots=12)
SLOW = """
import time
from dataclasses import replace
from cl_nscl.losses import OBJECTIVES
def slow(out, y, tau, pairs): time.sleep({seconds}); return OBJECTIVES["cl"].fn(out, y, tau, pairs)
OBJECTIVES["slow"] = replace(OBJECTIVES["cl"], fn=slow)
"""


@pytest.fixture(scope="module")
def slurm():
    need("slurm", local_slurm.missing())
    with local_slurm.running() as s: yield s


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory):
    "A run of half a minute under a time limit of one, which Slurm announces 20 seconds or more ahead; submitted first, looked at last."
    run = slow_run(tmp_path_factory.mktemp("limited"), 0.7, snapshots=1)
    cluster.submit([run], cluster.Slurm(minutes=1))
    return run


def call(capsys, command, *argv):
    code = main([command, "digits", "--preset", "smoke", "--experiment", "01_alignment", "--set", "objectives=[cl, nscl]", *argv])
    return code, "".join(capsys.readouterr())


def until(true, seconds=240): # the machine may be busy with other tests
    end = time.time() + seconds
    while not true():
        assert time.time() < end, "waited too long"
        time.sleep(0.2)


def runs_of(folder, **change): return [stored_run(dataclasses.replace(P, objective=o, **change), folder) for o in ("cl", "nscl")]
def slow_run(folder, seconds, **change):
    (folder/"slow.py").write_text(SLOW.format(seconds=seconds))
    return stored_run(dataclasses.replace(P, objective="slow", plugins=(str(folder/"slow.py"),), **change), folder/"runs")


@pytest.mark.usefixtures("limited")
def test_detach_status_and_the_notebooks_come_by_themselves(slurm, tmp_path, monkeypatch, capsys):
    "Submitted once, watched from any shell; the last job makes the results; the runs are as on one machine to the last bit."
    monkeypatch.chdir(tmp_path)
    ask = lambda *argv: call(capsys, "reproduce", "--cluster", "slurm", "--time", "10m", *argv)
    code, said = ask("--partition", "debug", "--detach", "--sbatch", "comment=a b")
    assert code == 0 and "1 new jobs of 1" in said, said
    code, said = ask("--detach")
    assert code == 0 and "0 new jobs of" in said, said
    status = call(capsys, "status")[1]
    assert status.startswith(("queued   cl, nscl", "running  cl, nscl", "done     cl, nscl")) and "01_alignment: " in status, status
    results = tmp_path/"results/digits"
    until(lambda: (results/"summary.html").exists())
    assert (results/"01_alignment.json").exists() and len(pd.read_csv(results/"runs.csv")) == 2
    status = call(capsys, "status")[1]
    assert "done     cl, nscl" in status and "2 of 2 runs done" in status and "01_alignment: made" in status, status
    assert len([p for p in (tmp_path/"runs/jobs").iterdir() if p.name.isdigit()]) == 2
    code, said = ask()
    assert code == 0 and "0 of 2 runs trained" in said, said
    for run in plan(study(layered("digits", "smoke", objectives=["cl", "nscl"])), ["01_alignment"]):
        train_runs([here := stored_run(run.p, tmp_path/"here")])
        assert [f.name for f in here.snapshots.values()] == [f.name for f in run.snapshots.values()]


def test_a_job_that_is_killed_and_requeued_continues_from_its_checkpoint(slurm, tmp_path):
    run = slow_run(tmp_path, 0.3)
    job, = cluster.submit([run], cluster.Slurm(minutes=10))
    until(lambda: max(stored_files(run.path, "checkpoint"), default=0) >= 8)
    assert slurm.call("scontrol", "requeue", job).returncode == 0
    assert cluster.submit([run], cluster.Slurm()) == []                                    # still the same job
    until(lambda: run.done)
    assert json.loads((run.path/"done.json").read_text())["first_step"] >= 8
    train_runs([through := runs_of(tmp_path/"through")[0]])
    assert [f.name for f in through.snapshots.values()] == [f.name for f in run.snapshots.values()]


def test_a_job_of_two_processes_that_is_pre_empted_goes_on_where_both_stopped(slurm, tmp_path):
    "Both processes get the signal, at different moments; the end is that of an undisturbed job of two, to the last bit."
    where = cluster.Slurm(processes=2, minutes=10)
    (tmp_path/"through").mkdir()
    run, through = slow_run(tmp_path, 0.3, B=26), slow_run(tmp_path/"through", 0, B=26)
    job, = cluster.submit([run], where)
    until(lambda: max(stored_files(run.path, "checkpoint"), default=0) >= 8)
    assert slurm.call("scancel", "--signal=USR2", f"{job}.0").returncode == 0
    cluster.submit([through], where)
    until(lambda: run.done and through.done)
    end = json.loads((run.path/"done.json").read_text())
    assert end["world"] == 2 and end["first_step"] % cluster.ASK == 0 < end["first_step"], end
    assert json.loads((through.path/"done.json").read_text())["first_step"] == 0
    assert [f.name for f in through.snapshots.values()] == [f.name for f in run.snapshots.values()]


def test_a_job_of_two_processes_fails_as_one(slurm, tmp_path):
    odd, bad = runs_of(tmp_path/"odd", B=25)[0], stored_run(dataclasses.replace(P, B=26, lr=1e30, clip=0.), tmp_path/"runs")
    with pytest.raises(UserError, match="B = 25 images cannot be shared by 2 processes"): cluster.submit([odd], cluster.Slurm(processes=2))
    with pytest.raises(UserError, match="chunk = 13 images cannot be shared by 2 processes"): cluster.submit(runs_of(tmp_path/"odd", B=26, chunk=13), cluster.Slurm(processes=2))
    with pytest.raises(Failed, match=r"1 of 1 groups of runs failed[\s\S]*cl \(seed 0\): Diverged"): cluster.train_on_slurm([bad], cluster.Slurm(processes=2, minutes=10), poll=1)


def test_lost_jobs_are_submitted_again_and_failed_ones_are_reported(slurm, tmp_path, capsys):
    "One job is cancelled from outside while the command waits; another diverges."
    lost, bad = slow_run(tmp_path, 0.2), stored_run(dataclasses.replace(P, lr=1e30, clip=0.), tmp_path/"runs")
    canceller = subprocess.Popen([sys.executable, "-c", f"""
import time, pathlib, json, subprocess
path = pathlib.Path({str(lost.path)!r})
while len([*path.glob("checkpoint-*")]) < 2: time.sleep(0.1)
subprocess.run(["scancel", "--signal=KILL", json.loads((path/"job.json").read_text())["job"]], check=True)
subprocess.run(["scancel", json.loads((path/"job.json").read_text())["job"]])
"""])
    with pytest.raises(Failed, match=r"1 of 2 groups of runs failed[\s\S]*cl \(seed 0\): Diverged: the (outputs|loss) of cl[\s\S]*_0_log.err"):
        cluster.train_on_slurm([lost, bad], cluster.Slurm(minutes=10), poll=1)
    assert canceller.wait(10) == 0
    assert lost.done and json.loads((lost.path/"done.json").read_text())["first_step"] > 0 and "submitted again" in capsys.readouterr().out
    assert cluster.state_of(bad, cluster.alive())[0] == "failed" and Path(cluster.job_of(bad)["log"]).read_text().count("Diverged")


def test_a_detached_study_submits_what_was_lost_again_and_then_makes_its_notebooks(slurm, tmp_path, monkeypatch, capsys):
    "The job of the runs is cancelled; the notebooks' job finds it gone, submits it again, and itself after it."
    monkeypatch.chdir(tmp_path)
    assert slurm.call("scontrol", "update", "NodeName=" + slurm.host, "State=DRAIN", "Reason=test").returncode == 0    # nothing starts before the job is cancelled
    try:
        code, said = call(capsys, "reproduce", "--cluster", "slurm", "--time", "10m", "--detach")
        assert code == 0 and "1 new jobs of 1: " in said, said
        assert slurm.call("scancel", said.split("1 new jobs of 1: ")[1].split(";")[0]).returncode == 0
    finally: assert slurm.call("scontrol", "update", "NodeName=" + slurm.host, "State=RESUME").returncode == 0
    until(lambda: (tmp_path/"results/digits/summary.html").exists())
    until(lambda: "2 of 2 runs done" in call(capsys, "status")[1])
    assert (tmp_path/"results/digits/01_alignment.json").exists()
    assert len([p for p in (tmp_path/"runs/jobs").iterdir() if p.name.isdigit()]) == 4                     # two of the runs, two of the notebooks


def test_two_calls_at_once_submit_each_run_once(slurm, tmp_path):
    code = f"""
from test_cluster import *
print(*cluster.submit(runs_of(Path({str(tmp_path/'runs')!r})), cluster.Slurm(minutes=10)))
"""
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ['PYTHONPATH']}"}
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    ids = [p.communicate(timeout=120)[0].split() for p in both]
    assert sorted(map(len, ids)) == [0, 1]
    until(lambda: all(r.done for r in runs_of(tmp_path/"runs")))


def test_a_job_waits_for_a_process_that_trains_the_run(slurm, tmp_path):
    run = runs_of(tmp_path/"runs")[0]
    with locked([run]):
        assert cluster.state_of(run, {})[0] == "running" and cluster.submit([run], cluster.Slurm()) == []


def test_a_refused_job_is_one_line(slurm, tmp_path):
    with pytest.raises(UserError, match="Slurm refused the job: .*partition"): cluster.submit(runs_of(tmp_path/"runs"), cluster.Slurm(partition="nowhere"))


def test_a_job_that_hits_its_time_limit_goes_on_from_a_checkpoint_of_that_moment(limited, tmp_path):
    until(lambda: limited.done)
    log = Path(cluster.job_of(limited)["log"]).read_text()
    assert "SIGUSR2" in log and "DUE TO JOB REQUEUE" in log
    assert json.loads((limited.path/"done.json").read_text())["first_step"] > 0               # there is no snapshot on the way
    train_runs([through := runs_of(tmp_path/"through", snapshots=1)[0]])
    assert [f.name for f in through.snapshots.values()] == [f.name for f in limited.snapshots.values()]


@pytest.mark.parametrize("squeue", ["", "echo the controller is away >&2; exit 1"], ids=["none", "silent"])
def test_status_says_what_it_knows_where_slurm_does_not_answer(tmp_path, monkeypatch, capsys, squeue):
    args = ["runs=" + str(tmp_path/"runs"), "out=" + str(tmp_path)]
    runs = plan(study(layered("digits", "smoke", objectives=["cl", "nscl"], runs=str(tmp_path/"runs"))), ["01_alignment"])
    monkeypatch.setenv("PATH", str(tmp_path/"bin"))
    (tmp_path/"bin").mkdir()
    if squeue: (tmp_path/"bin/squeue").write_text(f"#!/bin/sh\n{squeue}\n"); (tmp_path/"bin/squeue").chmod(0o755)
    for r in runs: r.path.mkdir(parents=True); (r.path/"job.json").write_text('{"job": "7", "log": "x"}')
    code, said = call(capsys, "status", *args)
    assert code == 0 and said.count("Slurm does not answer") == 1 and "unknown  cl, nscl" in said and "job 7" in said and "0 of 2 runs done, 2 unknown" in said, said
    for r in runs: train_runs([r])
    code, said = call(capsys, "status", *args)
    assert code == 0 and "Slurm" not in said and "2 of 2 runs done" in said, said                       # nobody to ask for


def test_without_slurm_or_submitit_one_line_says_so(tmp_path, monkeypatch):
    run = runs_of(tmp_path/"runs")[0]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on this machine"): cluster.submit_job(print, "x", tmp_path, cluster.Slurm())
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"needs submitit: pip install submitit, or in a clone of the project pip install -e '\.\[cluster\]'"): cluster.submit_job(print, "x", tmp_path, cluster.Slurm())
    assert failure(run) == ""
