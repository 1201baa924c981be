"""Networks and similarity descent side by side, and the experiment that reports them."""
import json, math

import pandas as pd, pytest, torch

from cl_nscl.losses import OBJECTIVES
from cl_nscl.plan import layered, shipped
from cl_nscl.run import execute
from cl_nscl.surrogate import flat, race, small_encoder, surrogate_rows


@pytest.fixture(scope="module")
def toy():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 1, 4, 4, generator=g).double(), torch.arange(40) % 4
    return x, y, torch.stack([torch.randperm(40, generator=g)[:12] for _ in range(10)])


def test_networks_are_plain_sgd_on_the_losses_of_identical_views(toy):
    x, y, stream = toy
    for i, o in enumerate(("cl", "nscl")):
        model = small_encoder(16, seed=3)
        sgd = torch.optim.SGD(model.parameters(), lr=0.3)
        for b in stream:
            sgd.zero_grad()
            OBJECTIVES[o].fn(model(x[b]).expand(2, -1, -1), y[b], 0.5, "cross").backward()
            sgd.step()
        for r in race(small_encoder(16, seed=3), x, y, stream, 0.3, 0.5): pass
        assert torch.allclose(r.w[i], torch.cat([p.detach().flatten() for p in model.parameters()]), atol=1e-9)


def test_a_race_does_not_depend_on_how_often_it_is_looked_at(toy):
    x, y, stream = toy
    ends = []
    for every in (1, 3, 10):
        for r in race(small_encoder(16), x, y, stream, 0.1, 0.5, every): pass
        ends.append((r.w.clone(), r.Sigma.clone(), r.matched.Sigma.clone()))
    for e in ends[1:]: assert all(torch.equal(a, b) for a, b in zip(ends[0], e))


def test_distinct_labels_leave_no_drift_anywhere(toy):
    "Every sample its own class: CL and NSCL are one objective."
    x, _, stream = toy
    for r in race(small_encoder(16), x, torch.arange(40), stream, 0.3, 0.5): pass
    assert torch.equal(r.w[0], r.w[1]) and r.gap == 0
    for d in (r.own, r.matched): assert torch.equal(d.Sigma[0], d.Sigma[1])


def test_a_linear_kernel_of_one_step_follows_the_network_in_the_limit(toy):
    "The displacement of the network in a small step is -eta J J' G: the surrogate's, through the tangent kernel."
    x, y, stream = toy
    model = small_encoder(16)
    w, units = flat(model)
    b, eta = stream[0], 1e-5
    full = lambda v: (z := units(v, x)) @ z.T
    for r in race(model, x, y, stream[:1], eta, 0.5): pass
    G = torch.zeros(40, 40, dtype=torch.float64)
    G[b[:, None], b] = (full(w)[b[:, None], b] - r.own.Sigma[0][b[:, None], b]) / eta      # what the surrogate moved by
    _, pull = torch.func.vjp(full, w)
    push = torch.func.jvp(full, (w,), pull(G))[1]
    assert ((r.Sigma[0] - full(w)) / -eta - push).norm() < 1e-2 * push.norm()
    assert r.kappa == pytest.approx((pull(G)[0].square().sum() / G.square().sum()).item(), rel=1e-4)


def test_certificate_of_the_surrogates_covers_their_drift(toy):
    x, y, stream = toy
    f = surrogate_rows(small_encoder(16), x, y, stream, 0.5, 0.5, every=5)
    wide = f[f.metric.isin(["drift", "certificate"])].pivot_table(index=["step", "surrogate"], columns="metric", values="value").dropna()
    assert len(wide) == 6 and (wide.certificate >= wide.drift * (1 - 1e-9)).all()
    apart = f[f.metric.isin(["apart", "cosine"])].pivot_table(index=["step", "surrogate", "objective"], columns="metric", values="value")
    assert (apart.apart >= (1 - apart.cosine**2).clip(lower=0)**0.5 - 1e-9).all()
    assert f.value.notna().all() and f.value.map(math.isfinite).all()


def test_experiment_runs_from_the_smoke_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    execute(shipped("experiments")/"07_bounds.ipynb", layered("digits", "smoke", out=str(tmp_path/"results")), tmp_path/"results"/"digits")
    folder = tmp_path/"results"/"digits"
    manifest = json.loads((folder/"07_bounds.json").read_text())
    assert all((folder/f).exists() for f in manifest["files"]) and len(manifest["charts"]) == 7
    for t in manifest["tables"]:
        table = pd.read_csv(folder/f"{t}.csv")
        assert len(table)
        if "value" in table: assert table.value.notna().all(), t
    found = {c["claim"]: c["effect"] for c in manifest["claims"]}
    assert len(found) == len(manifest["claims"]) and all(e is not None and math.isfinite(e) for e in found.values())
    assert {c["verdict"] for c in manifest["claims"] if c["kind"] == "check"} == {"holds"}                     # theorems: also on one seed of a toy
    assert found["The certificate never falls below the drift; smallest over the run"] > 0
    assert found["The drift of similarity descent falls with C"] > 0
