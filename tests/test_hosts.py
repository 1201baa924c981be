"""Runs that two hosts train together: network namespaces with names and addresses of their own, under torchrun and under a real Slurm of two nodes."""
import json, os, subprocess, sys
from pathlib import Path

import pytest

import hosts as local_hosts, slurm as local_slurm
from cl_nscl import cluster
from cl_nscl.store import stored_files
from conftest import need
from test_cluster import call, slow_run, until
from test_distributed import torchrun

SETTINGS = ["digits", "--preset", "smoke", "--set", "steps=6", "snapshots=1", "objectives=[cl, nscl]"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    need("hosts", local_hosts.missing())
    with local_hosts.Hosts(tmp_path_factory.mktemp("hosts"), 2) as h: yield h


@pytest.fixture(scope="module")
def slurm(hosts):
    need("slurm", local_slurm.missing())
    with local_slurm.running(cpus=2, hosts=hosts) as s: yield s


def ends(runs: Path): # what each run left, by its name
    return {d.name: (json.loads((d/"done.json").read_text())["world"], sorted(f.name for f in d.glob("snapshot-*"))) for d in runs.iterdir() if (d/"done.json").exists()}


def test_two_hosts_under_torchrun_are_two_processes_of_one(hosts, tmp_path):
    "To the last bit; the second host is the first one's equal, and only one of them writes."
    for d in ("one", "two"): (tmp_path/d).mkdir()
    start = lambda i: subprocess.Popen(hosts.on(f"node{i}", sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--node-rank", i, "--nproc-per-node", 1, "--master-addr", "node0",
        "--master-port", 29400, "-m", "cl_nscl.train", *SETTINGS), cwd=tmp_path/"two", env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    both = [start(i) for i in range(2)]
    said = [p.communicate(timeout=200) for p in both]
    assert [p.returncode for p in both] == [0, 0], said
    assert [len(out.splitlines()) for out, _ in said] == [2, 0]
    assert torchrun(2, *SETTINGS, cwd=tmp_path/"one").returncode == 0
    found = ends(tmp_path/"two/runs")
    assert found == ends(tmp_path/"one/runs") and [(w, len(s)) for w, s in found.values()] == [(2, 2), (2, 2)]


def test_a_job_on_two_nodes_that_is_pre_empted_goes_on_where_both_stopped(slurm, tmp_path):
    "A process on each node; the end is that of an undisturbed job of two processes on one node, to the last bit."
    (tmp_path/"through").mkdir()
    run, through = slow_run(tmp_path, 0.3, B=26), slow_run(tmp_path/"through", 0, B=26)
    job, = cluster.submit([run], cluster.Slurm(nodes=2, minutes=10))
    until(lambda: max(stored_files(run.path, "checkpoint"), default=0) >= 8)
    assert slurm.call("squeue", "-h", "-j", job, "-o", "%N").stdout.strip() == "node[0-1]"
    assert slurm.call("scancel", "--signal=USR2", f"{job}.0").returncode == 0
    cluster.submit([through], cluster.Slurm(processes=2, minutes=10))
    until(lambda: run.done and through.done)
    end = json.loads((run.path/"done.json").read_text())
    assert end["world"] == 2 and end["first_step"] % cluster.ASK == 0 < end["first_step"], end
    assert [f.name for f in through.snapshots.values()] == [f.name for f in run.snapshots.values()]


def test_a_study_on_two_nodes(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, said = call(capsys, "reproduce", "--cluster", "slurm", "--time", "10m", "--nodes", "2")
    assert code == 0 and (tmp_path/"results/digits/summary.html").exists(), said
    assert [w for w, _ in ends(tmp_path/"runs").values()] == [2, 2]
