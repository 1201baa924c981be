"""Rows of a study: what stands beside a number."""
import functools, math

import pytest, torch

from cl_nscl import measure
from cl_nscl.core import Params
from cl_nscl.measure import MEASURES, measured
from cl_nscl.store import stored_run, train_runs

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
