"""Intervals: coverage, clusters, many rows, and the permutation null against brute force."""
import itertools, math

import numpy as np, pandas as pd, pytest, torch

from cl_nscl.core import generator
from cl_nscl.intervals import bootstrap, chance_level, intervals, mean_interval, permutation_null
from cl_nscl.similarity import cka, similarities


def normal(*shape, seed=0, dtype=torch.float32): return torch.randn(*shape, generator=generator(seed, "test", *shape), dtype=dtype)


def grouped(seed, C=150, n=3, d=5):
    "Two models whose rows share a centre per class: classes, not rows, are independent."
    g = generator(seed, "grouped")
    y = torch.arange(C * n) % C
    centre, x, e = [torch.randn(k, d, generator=g) for k in (C, C * n, C * n)]
    h = 1.5 * centre[y] + 0.3 * x
    return {"a": h, "b": h + 0.8 * torch.randn(C, d, generator=g)[y] + 0.5 * e}, y


def test_clustered_intervals_cover_where_rows_do_not():
    truth = similarities(grouped(10**6, C=20_000)[0], ("cosine",)).set_index("metric").value
    hit = {"rows": [], "classes": []}
    for s in range(150):
        hs, y = grouped(s)
        for kind, labels in (("rows", None), ("classes", y)):
            found = intervals(hs, kernels=("cosine",), clusters=labels).set_index("metric")
            hit[kind].append([found.low[m] <= truth[m] <= found.high[m] for m in ("rsa", "rho", "r")])
    rows, classes = (np.mean(hit[k], axis=0) for k in ("rows", "classes"))
    assert (rows < 0.85).all() and (classes >= 0.90).all() and (classes <= 0.98).all(), (rows, classes)


def test_mean_interval_covers():
    hits = [(m := mean_interval(torch.rand(100, generator=generator(s, "u")) < 0.7))["low"] <= 0.7 <= m["high"] for s in range(400)]
    assert 0.91 < np.mean(hits) < 0.98


@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4])
def test_many_rows_agree_with_float64(noise):
    x, e = normal(3000, 12), normal(3000, 12, seed=1)
    y = x.double() + noise * e.double()
    fast = intervals({"a": x.double(), "b": y}).set_index("metric")
    assert (fast.low <= fast.value).all() and (fast.value <= fast.high).all()
    torch.set_float32_matmul_precision("high")                              # products in float64
    try: slow = intervals({"a": x.double(), "b": y}).set_index("metric")
    finally: torch.set_float32_matmul_precision("highest")
    assert np.allclose(fast.se, slow.se, rtol=1e-3, atol=1e-9)


def test_every_metric_against_the_bootstrap():
    x = normal(300, 5) * torch.linspace(1, 2, 5) + 0.4
    hs = {"a": x, "b": x + normal(300, 5, seed=1)}
    found, seen = intervals(hs).set_index("metric"), []
    def keep(i):
        seen.append(similarities({k: h[i] for k, h in hs.items()}).set_index("metric").value)
        return 0.0
    bootstrap(keep, 300, B=250)
    ratio = found.se / pd.DataFrame(seen[:-1]).std()
    assert ratio.between(0.82, 1.22).all(), ratio


def test_three_models_and_different_widths():
    hs = {"a": normal(200, 6), "b": normal(200, 6) + normal(200, 6, seed=1), "c": normal(200, 9, seed=2)}
    whole = intervals(hs)
    for a, b in itertools.combinations(hs, 2):
        part = intervals({a: hs[a], b: hs[b]}).set_index("metric").se
        same = whole[(whole.a == a) & (whole.b == b)].set_index("metric").se
        assert np.allclose(part, same[part.index], rtol=1e-7)


def test_twins_at_step_zero_have_no_spread():
    x = normal(1500, 6)
    found = intervals({"a": x, "b": x.clone()})
    assert (found.se < 1e-9).all() and np.allclose(found.low, found.high, atol=1e-8)


def test_permutation_mean_and_deviation_over_all_shuffles():
    x, y = normal(6, 3), normal(6, 2, seed=1)
    every = [similarities({"a": x, "b": y[list(p)]}, ("cosine",)).set_index("metric").value[["cka", "rsa"]] for p in itertools.permutations(range(6))]
    null = permutation_null(x, y, B=20)
    assert abs(null["mean"]["cka"] - np.mean(every, axis=0)[0]) < 1e-9 and abs(np.mean(every, axis=0)[1]) < 1e-9
    assert abs(null["sd"]["cka"] - np.std(every, axis=0)[0]) < 1e-9


def test_chance_level_matches_independent_models():
    level = chance_level(40, 30, 20, B=100)
    other = [cka(normal(40, 30, seed=s), normal(40, 20, seed=s + 1000)) for s in range(60)]
    assert abs(level["mean"]["cka"] - np.mean(other)) < 0.02


@pytest.mark.parametrize("make, says", [
    (lambda: intervals({"a": normal(9, 2), "b": normal(9, 2, seed=1)}, clusters=torch.arange(8)), "8 labels for 9 rows"),
    (lambda: intervals({"a": normal(9, 2), "b": normal(9, 2, seed=1)}, clusters=torch.zeros(9)), "at least 2 clusters"),
    (lambda: mean_interval(torch.tensor([1.0, math.nan])), "finite"), (lambda: intervals(lambda: iter([])), "names"),
    (lambda: permutation_null(normal(3, 2), normal(3, 2)), "at least 4 rows")])
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says): make()
