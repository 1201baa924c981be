"""Rows of a study: what stands beside a number."""
import functools, json, math

import pytest, torch

from cl_nscl import measure
from cl_nscl.core import Params
from cl_nscl.measure import MEASURES, measured
from cl_nscl.store import load_snapshot, stored_run, train_runs, write_stored

P = dict(dataset="digits", n_train=200, size=16, encoder="resnet8", proj_hidden=32, proj_dim=16, B=50, epochs=1, warmup=0, lr=0.1, flip=0, snapshots=1)


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train_runs(runs := [stored_run(Params(objective=o, **P), folder) for o in ("cl", "nscl")])
    return runs


def test_M03_every_row_says_of_how_many_images_and_features_it_is(twins):
    d, sizes = {"loss_gap": 16}, {"alignment": {("train", 120), ("test", 120), ("weights", 0)}, "downstream": {("test", 359)}, "collapse": {("train", 120)}, "loss_gap": {("train", 100)}}
    for what in sizes:
        rows = measured(what, twins, n_ref=120, last=True)
        assert set(zip(rows.split, rows.N)) == sizes[what]
        assert set(rows[rows.split != "weights"].d) == {d.get(what, 64)}


def test_E14_what_a_probe_warns_of_stands_in_its_row(twins, monkeypatch):
    monkeypatch.setattr(measure, "fit_linear_probe", functools.partial(measure.fit_linear_probe, max_iter=1))
    rows = measured("downstream", twins, last=True).set_index("metric")
    assert rows.note["linear"].str.contains("not converged after 1 steps").all() and rows.value.notna().all() and set(rows.note["nccc"]) == {""}


def test_M23_pairs_that_are_left_out_stand_in_the_row(twins, monkeypatch):
    "Two of three classes with one mean: the value is that of the other pairs, and the row says so."
    h = torch.tensor([0., 2., 0., 2., 10., 12.])[:, None] + torch.zeros(6, 3)
    monkeypatch.setattr(measure, "_h", lambda *a: h)
    ds = measure.dataset_of(twins[0].p)
    part = measure.Split(ds.train.x[:6], torch.tensor([0, 0, 1, 1, 2, 2]), ds.train.ids[:6])
    monkeypatch.setattr(measure, "reference", lambda *a: part)
    rows = {r["metric"]: r for r in MEASURES["collapse"](twins[:1], ds, 0)}
    assert rows["cdnv"]["value"] == pytest.approx(0.01) and "identical means: 1 of them" in rows["cdnv"]["note"]


def test_a_run_that_was_trained_to_other_weights_is_measured_again(tmp_path):
    "Under the same name: the rows belong to the snapshots, not to the run's parameters."
    runs = [stored_run(Params(objective=o, **P), tmp_path) for o in ("cl", "nscl")]
    train_runs(runs)
    value = lambda: measured("alignment", runs, 100, last=True).query("metric == 'cka' and split == 'test'").value.item()
    before, end = value(), max(runs[1].snapshots)
    other = {k: v + 0.1 * torch.ones_like(v) if v.is_floating_point() else v for k, v in load_snapshot(runs[1], end).items()}
    new, done = write_stored(runs[1].path, "snapshot", end, other), json.loads((runs[1].path/"done.json").read_text())
    (runs[1].path/"done.json").write_text(json.dumps(done | dict(snapshots=[*done["snapshots"][:-1], new.name])))
    assert value() != before
