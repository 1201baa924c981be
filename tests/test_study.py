"""A data set's whole study: its plan, every experiment at the smoke preset, what happens when it is interrupted or fails."""
import json, shutil, signal, subprocess, sys, time
from pathlib import Path

import pandas as pd, pytest

from cl_nscl.core import UserError, run_id
from cl_nscl.plan import POINTS, layered, plan, study, tasks, train_plan, train_size
from cl_nscl.twins import clock

ROOT = Path(__file__).resolve().parent.parent
ARGS = [sys.executable, "-m", "cl_nscl.run", "reproduce", "digits", "--preset", "smoke"]


def call(*more, cwd, timeout=900): return subprocess.run([*ARGS, *map(str, more)], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def test_D13_a_batch_of_one_class_stops_a_study_before_anything_trains(tmp_path):
    s = study(layered("digits", "smoke", classes=[7, 2], n_train=40, size=8, width=0.25, B=2, B_ref=2, epochs=1, runs=str(tmp_path)))
    with pytest.raises(UserError, match=r"B = 2: batch \d+ of epoch 0 \(seed 0\) would hold images of class [72] alone"): train_plan(plan(s, ["01_alignment"]))
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    "Every experiment of the smoke study, through papermill, by one command."
    folder = tmp_path_factory.mktemp("whole")
    done = call(cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.parametrize("name", POINTS)
def test_experiment_leaves_what_it_declares(whole, name):
    folder = whole[0]/"results/digits"
    m = json.loads((folder/f"{name}.json").read_text())
    assert (folder/f"{name}.ipynb").exists() and all((folder/f).stat().st_size for f in m["files"])
    assert all(f"{t}.md" in m["files"] and f"{t}.csv" in m["files"] and len(pd.read_csv(folder/f"{t}.csv")) for t in m["tables"])
    for c in m["charts"]:
        points = [r for rows in json.loads((folder/f"{c}.json").read_text())["datasets"].values() for r in rows]
        assert len(points) >= 2 and all(isinstance(r.get("value", 0), (int, float)) for r in points), c
        assert any(isinstance(v, float) for r in points for v in r.values()), c
        assert {f"{c}.svg", f"{c}.png"} <= {*m["files"]}
    assert name == "99_paper" or m["charts"] and m["claims"]
    assert bool(m["runs"]) == bool(POINTS[name](study(m["params"]))) or name == "99_paper"


@pytest.mark.parametrize("name", ["02_classes", "03_temperature", "04_batch_size"])
def test_sweeps_say_which_twins_they_trained(name):
    "A sweep trains the first two objectives, which need not be CL and NSCL: titles and claims are made of their names."
    cells = [c for c in json.loads((ROOT/f"nbs/experiments/{name}.ipynb").read_text())["cells"] if c["cell_type"] == "code" and "parameters" not in c["metadata"].get("tags", [])]
    code = "".join("".join(c["source"]) for c in cells)
    assert "CL" not in code.replace("cl_nscl", "") and "{pair}" in code


def test_every_number_leads_to_its_run(whole):
    folder = whole[0]/"results/digits"
    runs = set(pd.read_csv(folder/"runs.csv").run)
    for f in ("alignment", "classes", "temperature", "batch_size", "downstream", "collapse", "loss_gap"):
        rows = pd.read_csv(folder/f"{f}.csv")
        assert rows.value.notna().all() and {i for pair in rows.run for i in pair.split("+")} <= runs, f


def test_claims_are_listed_one_by_one(whole):
    folder, out = whole
    claims = pd.read_csv(folder/"results/digits/claims.csv")
    assert set(claims.columns) == {"experiment", "claim", "figure", "verdict", "effect", "low", "high", "seeds", "unit", "kind", "margin"}
    findings, checks = (claims[claims.kind == k] for k in ("finding", "check"))
    assert set(findings[findings.seeds == 1].verdict) == {"seen (one seed)", "not seen (one seed)"}    # one seed confirms nothing
    assert len(checks) >= 2 and set(checks.verdict) == {"holds"}
    page = (folder/"results/digits/summary.html").read_text()
    assert '<img src="figure4.svg"' in page and "Test CKA of CL and NSCL rises with tau" in page and "Test CKA of CL and NSCL rises with tau" in out and "Missing" not in page


def test_loss_gap_stays_between_zero_and_its_bound(whole):
    claims = pd.read_csv(whole[0]/"results/digits/claims.csv").query("experiment == '08_loss_gap'").set_index("claim").effect
    assert claims[claims.index.str.contains("bound|negative")].gt(0).all()


def test_nothing_is_claimed_of_a_course_that_no_snapshot_shows(tmp_path):
    "One snapshot after the start: no growth, no fall; and the start itself, where all twins are one model, is no snapshot to fall from."
    done = call("--experiment", "01_alignment", "06_collapse", "--set", "snapshots=1", "long=3", "seeds=2", "objectives=[cl, nscl]", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "grows" not in done.stdout and "falls" not in done.stdout and (tmp_path/"results/digits/06_collapse.json").exists()


def test_results_are_small(whole):
    assert sum(f.stat().st_size for f in (whole[0]/"results/digits").iterdir()) < 3.5e6


def test_the_last_notebook_shows_results_of_this_study_alone_and_no_data_set_twice(whole, tmp_path):
    "What other parameters left in the folder is missing; a data set that is compared with itself is there once."
    for name in ("digits", "others"): shutil.copytree(whole[0]/"results/digits", tmp_path/"results"/name)
    done = call("--experiment", "99_paper", "--set", "seeds=2", "compare=[digits, others, nowhere]", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    claims, cka = (pd.read_csv(tmp_path/f"results/digits/{t}.csv") for t in ("paper_claims", "paper_cka"))
    assert set(claims.dataset) == {"others"} and list(cka.columns) == ["pair", "others", "the paper, Tiny-ImageNet"]
    text = (tmp_path/"results/digits/99_paper.ipynb").read_text()
    assert all(f"digits: {name}" in text for name in POINTS if name != "99_paper") and "nowhere: nothing" in text and "others: nothing" not in text


def test_second_call_executes_nothing(whole):
    folder = whole[0]
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (folder/"results/digits").glob("*.ipynb")}
    done = call(cwd=folder)
    assert done.returncode == 0 and " of " in done.stdout and "\n0 of " in done.stdout
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (folder/"results/digits").glob("*.ipynb")}


@pytest.mark.parametrize("names", [("digits",), ("digits", "smoke"), ("textures",), ("textures", "smoke"), ("digits", "quick"), ("digits", "laptop")])
def test_plan_trains_each_run_once(names):
    s = study(layered(*names, runs="nowhere"))
    runs, wanted = plan(s), [p for name in (s.experiments or POINTS) for _, twins in POINTS[name](s) for p in twins]
    assert len({r.id for r in runs}) == len(runs) < len(wanted)
    assert {r.id for r in runs} == {*map(run_id, wanted)}
    assert sorted(r.id for g in tasks(runs, 2) for r in g) == sorted(r.id for r in runs)


def test_all_rules_meet_at_B_ref():
    s = study(layered("digits", "smoke"))
    assert len({run_id(p) for labels, twins in POINTS["04_batch_size"](s) for p in twins if labels["B"] == s.B_ref}) == 2
    at_ref = {run_id(p) for labels, twins in POINTS["04_batch_size"](s) for p in twins if labels["B"] == s.B_ref}
    assert at_ref <= {run_id(p) for labels, twins in POINTS["03_temperature"](s) for p in twins if labels["tau"] == s.tau}


@pytest.mark.parametrize("name, core_seconds", [("digits", 2100), ("textures", 2600)])
def test_laptop_recipes_fit_some_twenty_minutes_of_two_cores(name, core_seconds):
    "At 0.15 core-seconds for a step of one model on 200 images."
    runs = plan(study(layered(name)))
    steps = sum(clock(r.p, train_size(r.p)).T * r.p.B / 200 for r in runs)
    assert 0.15 * steps < core_seconds


@pytest.mark.parametrize("change, says", [
    (dict(class_counts=[2, 11]), "11 must be between 2 and 10"), (dict(B_ref=7), "must hold B_ref = 7"), (dict(class_n=5000), "n_train = 5000"),
    (dict(experiments=["03_temprature"]), "did you mean '03_temperature'"), (dict(B=5000), "larger than the training set"),
    (dict(steps=7), "steps = 7: must be 0")])
def test_a_plan_that_cannot_be_is_refused(change, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")): plan(study(layered("digits", **change)))


def test_misspelt_parameter_is_refused_before_anything_trains(tmp_path):
    done = call("--set", "sweep_epoch=2", cwd=tmp_path)
    assert done.returncode == 2 and "did you mean 'sweep_epochs'" in done.stderr and not [*tmp_path.iterdir()]


def test_interrupted_study_resumes_without_retraining(tmp_path):
    args = ["--experiment", "01_alignment", "--jobs", "1", "--set", "epochs=24", "snapshots=12", "objectives=[cl, nscl]"]
    process = subprocess.Popen([*ARGS, *args], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if len([*tmp_path.rglob("snapshot-*")]) >= 6 or process.poll() is not None: break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "goes on from the last checkpoints" in process.stderr.read()
    done = call(*args, cwd=tmp_path)
    assert done.returncode == 0 and "2 of 2 runs trained" in done.stdout, done.stdout + done.stderr
    assert all(json.loads(p.read_text())["first_step"] > 0 for p in tmp_path.rglob("done.json"))


def test_a_failed_run_is_reported_and_the_rest_is_made(tmp_path):
    done = call("--experiment", "01_alignment", "03_temperature", "99_paper", "--set", "taus=[1.0e-300, 0.5]", cwd=tmp_path)
    folder = tmp_path/"results/digits"
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "1 of " in done.stderr and "log.txt" in done.stderr and "03_temperature was not made: it needs" in done.stderr
    assert (folder/"01_alignment.json").exists() and (folder/"99_paper.json").exists() and not [*folder.glob("03_temperature*")]
    assert "03_temperature was not made" in (folder/"summary.html").read_text()
    assert list(Path(tmp_path/"runs").rglob("log.txt"))


def test_dry_run_lists_the_plan_and_trains_nothing(tmp_path):
    done = call("--dry-run", "--seeds", "2", "--jobs", "2", cwd=tmp_path)
    lines = done.stdout.strip().splitlines()
    assert done.returncode == 0 and not [*tmp_path.iterdir()]
    assert len(lines) == 1 + len(plan(study(layered("digits", "smoke", seeds=2)))) and "to train: about" in lines[-1] and "in 2 processes" in lines[-1]
