"""The three ways to run a study, on real images, from any folder."""
import json, subprocess, sys
from pathlib import Path

import nbformat, pandas as pd, pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = {"01_alignment.ipynb", "01_alignment.json", "alignment.csv", "alignment_end.csv", "alignment_end.md", "claims.csv", "claims.md", "runs.csv", "summary.html",
         *(f"figure{n}.{ext}" for n in (1, 2) for ext in ("json", "svg", "png"))}


def call(*argv, cwd, timeout=300):
    return subprocess.run([sys.executable, "-m", *map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=timeout)


def reproduce(cwd, *more): return call("cl_nscl.run", "reproduce", "digits", "--preset", "smoke", "--experiment", "01_alignment", "--set", "control=1", *more, cwd=cwd)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    "One experiment of the smoke study, run by the command line in a folder of its own."
    folder = tmp_path_factory.mktemp("study")
    done = reproduce(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_reproduce_leaves_what_it_says(study):
    folder, out = study
    found = {p.name for p in (folder/"results"/"digits").iterdir()}
    assert FILES <= found, FILES - found
    assert "5 of 5 runs trained" in out and "results/digits" in out and "CL to NSCL" in out
    rows = pd.read_csv(folder/"results/digits/alignment.csv")
    assert list(rows.columns[:6]) == ["run", "epoch", "split", "pair", "metric", "value"]
    assert rows.value.notna().all() and set(rows.pair) == {"cl-nscl", "cl-scl", "cl-ce", "cl-cl*", "cl-cl@0"}
    assert set(rows.metric) == {"cka", "cka_debiased", "rsa", "weight_gap"} and set(rows.split) == {"train", "test", "weights"}
    assert not rows.duplicated(["run", "epoch", "split", "pair", "metric"]).any()


def test_M19_twins_start_as_one_model(study):
    rows = pd.read_csv(study[0]/"results/digits/alignment.csv").query("epoch == 0")
    gap = rows.metric == "weight_gap"
    assert (rows[gap].value == 0).all() and (rows[~gap].value - 1).abs().max() < 1e-6 and set(rows[~gap].split) == {"train", "test"}


def test_claims_about_the_control_are_not_the_papers(study):
    claims = pd.read_csv(study[0]/"results/digits/claims.csv", keep_default_na=False)
    control = claims[claims.claim.str.contains("other batches and views")]
    assert len(control) == 5 and set(control.figure) == {""} and "" not in set(claims.figure[claims.index.difference(control.index)])


def test_charts_hold_the_numbers(study):
    for name in ("figure1", "figure2"):
        text = (study[0]/f"results/digits/{name}.json").read_text()
        spec = json.loads(text)
        values = [v for rows in spec["datasets"].values() for r in rows for k, v in r.items() if k == "value"]
        assert len(values) >= 9 and all(isinstance(v, (int, float)) for v in values)
        assert (study[0]/f"results/digits/{name}.svg").read_text().startswith("<svg")


def test_every_number_leads_to_its_run(study):
    folder = study[0]/"results/digits"
    runs = pd.read_csv(folder/"runs.csv").set_index("run")
    for _, (name, pair) in pd.read_csv(folder/"alignment.csv")[["run", "pair"]].drop_duplicates().iterrows():
        a, *others = name.split("+")
        assert runs.loc[a].objective == "cl" and len(others) == (pair != "cl-cl@0")
        for b in others: assert runs.loc[b].objective == pair.split("-")[1].strip("*") and (runs.loc[b].stream_seed != -1) == (pair == "cl-cl*") and runs.loc[a].tau == runs.loc[b].tau


def test_the_control_is_drawn_tabled_and_claimed(study):
    folder = study[0]/"results/digits"
    name = "CL to CL, other batches and views"
    assert name in (folder/"figure2.svg").read_text() and name in pd.read_csv(folder/"alignment_end.csv").pair.tolist()
    claims = pd.read_csv(folder/"claims.csv").set_index("claim")
    for m in ("CKA", "RSA"):
        end = pd.read_csv(folder/"alignment.csv").query(f"epoch == 2 and split == 'test' and metric == '{m.lower()}'").set_index("pair").value
        assert abs(claims.loc[f"Test {m} to CL at the end: NSCL, same batches > CL, other batches and views"].effect - (end["cl-nscl"] - end["cl-cl*"])) < 1e-9


def test_executed_notebook_names_no_folder_of_the_machine(study):
    folder, _ = study
    text = (folder/"results/digits/01_alignment.ipynb").read_text()
    assert str(folder) not in text and str(ROOT) not in text
    assert nbformat.read(folder/"results/digits/01_alignment.ipynb", 4).cells


def test_second_call_trains_nothing_and_changes_nothing(study):
    folder, _ = study
    before = {p.name: p.read_bytes() for p in (folder/"results/digits").iterdir()}
    done = reproduce(folder)
    assert done.returncode == 0 and "0 of 5 runs trained" in done.stdout
    after = {p.name: p.read_bytes() for p in (folder/"results/digits").iterdir()}
    assert {n for n in before if before[n] != after.get(n)} == set() and set(after) == set(before)


def test_executed_notebook_is_quiet(study):
    nb = nbformat.read(study[0]/"results/digits/01_alignment.ipynb", 4)
    assert not [o for c in nb.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"]


def test_processes_do_not_change_a_bit(study, tmp_path):
    "Lockstep in one process or twins in two: the names of snapshots carry the hash of their content."
    done = reproduce(tmp_path, "jobs=1")
    assert done.returncode == 0, done.stderr
    names = lambda folder: {p.relative_to(folder).as_posix() for p in (folder/"runs").rglob("snapshot-*")}
    assert names(tmp_path) == names(study[0]) and len(names(tmp_path)) == 15
    assert (tmp_path/"results/digits/alignment.csv").read_bytes() == (study[0]/"results/digits/alignment.csv").read_bytes()


def test_papermill_by_hand(study, tmp_path):
    "The same notebook, from another folder, with the runs that exist."
    done = call("papermill", ROOT/"nbs/experiments/01_alignment.ipynb", "out.ipynb", "-f", ROOT/"params/digits.yaml", "-f", ROOT/"params/smoke.yaml",
                "-p", "runs", study[0]/"runs", "-p", "control", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "unknown parameter" not in done.stderr.lower()
    assert (tmp_path/"results/digits/alignment.csv").read_bytes() == (study[0]/"results/digits/alignment.csv").read_bytes()


def test_N01_papermill_by_hand_with_a_misspelt_name_fails(tmp_path):
    done = call("papermill", ROOT/"nbs/experiments/01_alignment.ipynb", "out.ipynb", "-p", "lrr", "0.1", cwd=tmp_path)
    assert done.returncode != 0 and "unknown parameter 'lrr'" in done.stderr and not (tmp_path/"results").exists()


def test_N11_an_executed_notebook_stores_few_lines_of_progress(study):
    nb = nbformat.read(study[0]/"results/digits/01_alignment.ipynb", 4)
    assert max(len(o.get("text", "").splitlines()) for c in nb.cells if c.cell_type == "code" for o in c.outputs) < 50


@pytest.mark.parametrize("argv, says", [
    (["reproduce", "digit"], "unknown data set or preset 'digit' (did you mean 'digits'?)"),
    (["reproduce", "digits", "--set", "lrr=1"], "unknown parameter 'lrr' (did you mean 'lr'?)"),
    (["reproduce", "digits", "--set", "objectives=[cl, nsccl]"], "unknown objective 'nsccl' (did you mean 'nscl'?)"),
    (["reproduce", "digits", "--set", "B=5000"], "larger than the training set"),
])
def test_a_mistake_is_one_line_and_exit_code_2(argv, says, tmp_path):
    done = call("cl_nscl.run", *argv, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_diverged_run_names_step_objective_and_checkpoint(tmp_path):
    done = reproduce(tmp_path, "lr=1e30", "clip=0", "optimizer=sgd", "momentum=0.99", "epochs=20", "snapshots=1")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step" in done.stderr and "cl" in done.stderr and "last good checkpoint" in done.stderr
    assert list((tmp_path/"runs").rglob("checkpoint-*")) and not (tmp_path/"results/digits/alignment.csv").exists()


def test_every_experiment_lists_every_parameter():
    "The parameters cell is the list of the study's parameters with the values of the smoke study: seconds, and never out of date."
    from cl_nscl.plan import layered, parameters_cell
    for path in sorted((ROOT/"nbs/experiments").glob("*.ipynb")):
        cell, = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
        assert cell.source == parameters_cell(layered("digits", "smoke")), path.name
