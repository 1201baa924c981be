"""Collapse metrics: known faults, oracles from dense matrices, invariances, refusals."""
import math, warnings

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

from cl_nscl.collapse import (alignment, cdnv, cdnv_pairs, directional_cdnv, effective_rank, nc1, nc2, nc3, nc4, uniformity)
from cl_nscl.core import generator
from cl_nscl.probes import fit_linear_probe

BOTH = [cdnv, directional_cdnv]
column = lambda *v: torch.tensor(v)[:, None].float()


def clouds(n=20, C=5, d=8, seed=0, spread=1.0):
    centres, y = torch.randn(C, d, generator=generator(0, "centres")), torch.arange(C).repeat(n)
    return centres[y] + spread * torch.randn(C * n, d, generator=generator(seed, "rows")), y


def uneven(seed=0):
    "Classes 3, 5 and 9 with 1, 4 and 30 rows."
    y = torch.tensor([3] + [5] * 4 + [9] * 30)
    return torch.randn(35, 6, generator=generator(seed, "uneven")) + y[:, None], y


def slow(h, y, directional):
    "Pair by pair from the definition, with numpy."
    h, y, out = h.double().numpy(), y.numpy(), []
    for i in np.unique(y):
        for j in np.unique(y[y < i]):
            D = h[y == i].mean(0) - h[y == j].mean(0)
            P = np.outer(D, D) / (D @ D) if directional else np.eye(len(D))
            out.append(sum(np.trace(P @ np.cov(h[y == c].T, bias=True).reshape(len(D), -1)) for c in (i, j)) / (2 * D @ D))
    return np.mean(out)


@pytest.mark.parametrize("f", BOTH)
def test_M22_two_classes_on_a_line(f):
    h, y = column(0, 2, 10, 12), torch.tensor([0, 0, 1, 1])
    for offset in (0, 1e4, -1e6): assert f(h + offset, y) == pytest.approx(0.01, abs=1e-15)
    plane = torch.cat([h, torch.tensor([-5.0, 5, -5, 5])[:, None]], 1)  # variance across the line counts in one form alone
    assert f(plane, y) == pytest.approx(0.26 if f is cdnv else 0.01)


@pytest.mark.parametrize("directional", [False, True])
def test_M23_pairs_with_one_mean_are_left_out_and_counted(directional):
    h, y = column(0, 2, 0, 2, 10, 12), torch.tensor([0, 0, 1, 1, 2, 2])
    p = cdnv_pairs(h, y, directional)
    assert p.left_out == 1 and p.mean == pytest.approx(0.01) and math.isnan(p.value[0, 1]) and math.isnan(p.value[2, 2])
    with pytest.warns(UserWarning, match="identical means: 1 of them"): assert BOTH[directional](h, y) == pytest.approx(0.01)
    with pytest.raises(ValueError, match="all classes have the same mean, CDNV is infinite"): cdnv_pairs(h[:4], y[:4], directional)


@pytest.mark.parametrize("directional", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_M23_equal_means_are_found_in_spite_of_rounding(directional, offset):
    "The same rows in another order, and rows that are all alike in classes of different sizes."
    h = torch.randn(7, 5, generator=generator(0, "M23")).double() + offset
    y = torch.tensor([0] * 7 + [1] * 7 + [2])
    assert cdnv_pairs(torch.cat([h, h.flip(0), h[:1] + 9]), y, directional).left_out == 1
    dots = torch.full((11, 3), 0.1) + offset
    dots[8:] += 1
    p = cdnv_pairs(dots, torch.tensor([0] * 3 + [1] * 5 + [2] * 3), directional)
    assert p.left_out == 1 and p.mean == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_M23_means_are_equal_up_to_the_rounding_of_the_data_type(dtype):
    "Class 1 mirrors class 0 at its mean, but for the rounding of its rows: in float64 arithmetic CDNV would be 1e15."
    a, far = (torch.randn(500, 64, generator=generator(0, "M23", s)) for s in "ab")
    a = a.to(dtype)
    h, y = torch.cat([a, (2 * a.double().mean(0) - a.double()).to(dtype), (far + 5).to(dtype)]), torch.arange(3).repeat_interleave(500)
    assert cdnv_pairs(h, y).left_out == 1
    for f, want in ((cdnv, 0.04), (directional_cdnv, 0.0006)):
        with pytest.warns(UserWarning, match="1 of them"): assert f(h, y) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize("f", [*BOTH, nc1, nc2, effective_rank])
def test_M08_a_net_that_is_constant_up_to_rounding_is_refused(f):
    h, y = torch.randn(1, 64, generator=generator(0, "M08")) * (1 + 1e-7 * torch.randn(400, 1, generator=generator(0, "M08", 1))), torch.arange(400) % 4
    with pytest.raises(ValueError, match="same mean|all rows are equal"): f(h, y) if f is not effective_rank else f(h)


def test_M22_labels_from_every_second_place():
    h, y = clouds()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cdnv(h, y.repeat_interleave(2)[::2]) == cdnv(h, y)


@pytest.mark.parametrize("b", [torch.tensor([6.0]), torch.zeros(3)])
def test_M24_a_bias_for_each_class(b):
    h, y = clouds(C=2)
    with pytest.raises(ValueError, match=r"b: must be \[C\] = \[2\]"): nc4(h, y, torch.randn(2, 8, generator=generator(0, "W")), b)


def test_M23_close_means_are_not_equal():
    h, y = column(0, 2, 1e-4, 2.0001, 10, 12), torch.tensor([0, 0, 1, 1, 2, 2])
    assert cdnv_pairs(h, y).left_out == 0
    assert cdnv_pairs(h, y).value[0, 1] == pytest.approx(1e8, rel=1e-2)


@pytest.mark.parametrize("directional", [False, True])
def test_M24_classes_that_are_present_and_how_many(directional):
    "Labels 7 and 8 of whatever number of classes; values as with labels 0 and 1."
    h, y = column(0, 2, 10, 12), torch.tensor([8, 8, 7, 7])
    p = cdnv_pairs(h, y, directional)
    assert p.classes.tolist() == [7, 8] and p.mean == pytest.approx(0.01)
    h, y = clouds()
    some = y != 3                                                   # class 3 of 5 has no rows
    assert cdnv_pairs(h[some], y[some], directional).classes.tolist() == [0, 1, 2, 4]
    kept = torch.tensor([0, 1, 2, 4])
    assert torch.allclose(cdnv_pairs(h[some], y[some], directional).value, cdnv_pairs(h, y, directional).value[kept][:, kept], rtol=1e-9, equal_nan=True)
    assert nc1(h[some], y[some]) > 0 and nc2(h[some], y[some]).equinorm > 0


@pytest.mark.parametrize("data", [clouds, uneven])
@pytest.mark.parametrize("directional", [False, True])
def test_cdnv_is_its_definition(data, directional):
    h, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                             # numpy on the covariance of one row
        assert BOTH[directional](h, y) == pytest.approx(slow(h, y, directional), rel=1e-9)


@pytest.mark.parametrize("f", [*BOTH, nc1, lambda h, y: nc2(h, y).maximal, lambda h, y: effective_rank(h)])
def test_a_large_offset_in_float32_changes_nothing(f):
    "Features on a grid that float32 holds exactly at 1e4: the same numbers to the last digits."
    h, y = clouds()
    h = (h * 64).round() / 64
    assert f(h + 1e4, y) == pytest.approx(f(h, y), rel=1e-9)


@pytest.mark.parametrize("f", [*BOTH, nc1, lambda h, y: nc2(h, y).equiangular, lambda h, y: effective_rank(h), lambda h, y: nc2(h, y).equinorm])
def test_invariances(f):
    "Order of rows, names of classes, scale, shift, rotation."
    h, y = clouds()
    h, want = h.double(), f(h.double(), y)
    order = torch.randperm(len(y), generator=generator(0, "order"))
    Q = torch.linalg.qr(torch.randn(8, 8, generator=generator(0, "Q"), dtype=torch.float64)).Q
    for a, b in ((h[order], y[order]), (h, (3 * y + 2) % 5), (7 * h, y), (h + 5, y), (h @ Q, y)): assert f(a, b) == pytest.approx(want, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 5))
def test_directional_is_never_above_the_plain_form(seed, C, d):
    h, y = clouds(n=3, C=C, d=d, seed=seed)
    p, q = cdnv_pairs(h, y), cdnv_pairs(h, y, directional=True)
    keep = ~p.value.isnan()
    assert (q.value[keep] <= p.value[keep] * (1 + 1e-9)).all() and (q.value[keep] >= 0).all()
    if d == 1: assert q.mean == pytest.approx(p.mean, rel=1e-9)


def test_cdnv_of_many_classes_fits():
    "C = 1,000, d = 2,048: checked against the definition on a few pairs."
    C, d = 1000, 2048
    h = torch.randn(2 * C, d, generator=generator(0, "many"))
    y = torch.arange(C).repeat(2)
    p, q = cdnv_pairs(h, y), cdnv_pairs(h, y, directional=True)
    assert p.value.shape == (C, C) and p.left_out == 0
    for i, j in ((0, 1), (17, 903), (998, 999)):
        pick = (y == i) | (y == j)
        for found, f in ((p, cdnv), (q, directional_cdnv)): assert found.value[i, j].item() == pytest.approx(f(h[pick], y[pick]), rel=1e-8)


@pytest.mark.parametrize("data", [clouds, uneven])
def test_nc1_is_the_trace_with_the_pseudoinverse(data):
    h, y = data()
    own = [h[y == c].double().numpy() for c in y.unique()]
    mu = np.stack([v.mean(0) for v in own])
    S_B = np.cov(mu.T, bias=True)
    S_W = sum((v - v.mean(0)).T @ (v - v.mean(0)) / len(v) for v in own) / len(own)
    assert nc1(h, y) == pytest.approx(np.trace(S_W @ np.linalg.pinv(S_B, rcond=1e-10)) / len(own), rel=1e-8)


def test_a_collapsed_set_has_reached_all_four():
    "Features at the corners of a simplex, the classifier that points there."
    C = 6
    M = (torch.eye(C) - 1 / C).double()
    h, y = 3 * M.repeat(4, 1) + 11, torch.arange(C).repeat(4)
    assert nc1(h, y) == pytest.approx(0, abs=1e-20)
    assert max(nc2(h, y)) < 1e-10
    assert nc3(h, y, 5 * M) == pytest.approx(0, abs=1e-12)
    assert nc4(h, y, M) == 1.0


def test_a_trained_probe_agrees_with_the_nearest_centre_more_on_tighter_classes():
    found = []
    for spread in (0.3, 1.0, 3.0):
        h, y = clouds(spread=spread)
        p = fit_linear_probe(h, y, reg=0.01)
        W = p.W / p.scale
        found.append(nc4(h, y, W, p.b - W @ p.mean))
    assert found[0] == 1.0 > found[1] > found[2] > 0.3


def test_alignment_and_uniformity_know_no_scale_and_take_unit_rows():
    z1, z2 = (torch.randn(50, 6, generator=generator(0, s)) for s in ("z1", "z2"))
    u1, u2 = (z / z.norm(dim=1, keepdim=True) for z in (z1, z2))
    assert alignment(3 * z1, 0.5 * z2) == pytest.approx(float((u1 - u2).norm(dim=1).pow(2).mean()), rel=1e-6)
    assert alignment(z1, z2, alpha=1) == pytest.approx(float((u1 - u2).norm(dim=1).mean()), rel=1e-6)
    assert alignment(z1, z1) == 0
    want = torch.pdist(u1.double()).pow(2).mul(-3).exp().mean().log()
    for chunk in (1, 16, 50, 99): assert uniformity(9 * z1, t=3, chunk=chunk) == pytest.approx(float(want), rel=1e-6)


def test_uniformity_does_not_underflow():
    "Opposite points and a narrow kernel: e^-4000 is no float, its log is."
    assert uniformity(column(1, -1), t=1000) == pytest.approx(-4000)


@pytest.mark.parametrize("N, d", [(100, 12), (12, 100)])
@pytest.mark.parametrize("centred", [True, False])
def test_effective_rank_is_that_of_the_singular_values(N, d, centred):
    h = torch.randn(N, d, generator=generator(0, "rank")) + 0.5
    x = h.double() - h.double().mean(0) * centred
    s = torch.linalg.svdvals(x)
    p = s[s > 1e-10 * s[0]] / s.sum()
    assert effective_rank(h, centred) == pytest.approx(float(torch.exp(-(p * p.log()).sum())), rel=1e-6)


def test_effective_rank_of_known_spectra():
    assert effective_rank(torch.eye(7), centred=False) == pytest.approx(7)
    assert effective_rank(torch.cat([torch.eye(3), -torch.eye(3)]).repeat(1, 2) + 1e4) == pytest.approx(3, rel=1e-6)  # twice the same features
    for bad in (torch.ones(5, 3), torch.full((5, 3), 0.1) + 1e4, torch.zeros(4, 2)):
        with pytest.raises(ValueError, match="all rows are equal"): effective_rank(bad)


def test_what_has_no_value_is_refused():
    h, y = clouds()
    bad = h.clone(); bad[3, 1] = float("inf")
    for f in (*BOTH, nc1, nc2, lambda h, y: nc3(h, y, torch.ones(5, 8)), lambda h, y: nc4(h, y, torch.ones(5, 8))):
        with pytest.raises(ValueError, match="row 3 holds NaN or inf"): f(bad, y)
        with pytest.raises(ValueError, match="needs two classes with rows, not 1"): f(h, 0 * y)
        with pytest.raises(ValueError, match="whole numbers"): f(h, y[1:])
    same = torch.cat([h[y == 0], h[y == 0].flip(0)]) + 3, torch.arange(2).repeat_interleave(20)
    for f in (nc1, nc2):
        for h1, y1 in (same, (torch.ones(4, 2), torch.tensor([0, 0, 1, 1]))):
            with pytest.raises(ValueError, match="all classes have the same mean"): f(h1, y1)
    with pytest.raises(ValueError, match="has no direction"): nc2(column(0, 1, 2), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="W: must be"): nc3(h, y, torch.ones(4, 8))
    with pytest.raises(ValueError, match="all weights are zero"): nc3(h, y, torch.zeros(5, 8))
    with pytest.raises(ValueError, match="z1 and z2: must have one shape"): alignment(h, h[1:])
    with pytest.raises(ValueError, match="z2: row 0 is zero"): alignment(h, 0 * h)
    with pytest.raises(ValueError, match="needs two rows"): uniformity(h[:1])


def test_numpy_and_half_precision_are_welcome():
    h, y = clouds()
    for f in (*BOTH, nc1): assert f(h.numpy(), y.numpy()) == f(h, y) == pytest.approx(f(h.half(), y.int()), rel=0.02)
