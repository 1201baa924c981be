"Similarity descent against its bounds, on random small problems that try to break them."
import math

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from cl_nscl.bounds import Delta_sharp, expansion
from cl_nscl.core import UserError
from cl_nscl.dynamics import (ROW_WEIGHTS, advance, descend, drift_bounds, matrix_cka, matrix_rho, matrix_rsa, row_loss, row_weights, similarity_descent,
                              smoothness, snapshot, spectral_norm, start)

torch.set_num_threads(1)
ORDERS = [("cl", "nscl"), ("nscl", "cl")]
PAIRS = [(a, b) for a in ROW_WEIGHTS for b in ROW_WEIGHTS if a != b]


def problem(seed, N, C, B, T, tight=1.0):
    "Cosines of N points in C clusters, labels, and T batches of B without a one-class batch"
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(N) % C)
    z = tight * rng.normal(size=(C, 4))[y] + rng.normal(size=(N, 4))
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    batches = []
    while len(batches) < T:
        b = rng.permutation(N)[:B]
        if len(set(y[b])) > 1: batches.append(b)
    return torch.from_numpy(z @ z.T), torch.from_numpy(y), batches


problems = st.builds(lambda seed, N, C, share, T, tight: problem(seed, N, min(C, N // 2), max(2, int(share * N)), T, tight),
                     st.integers(0, 10**6), st.integers(6, 24), st.integers(2, 8), st.floats(0.3, 1), st.integers(1, 6), st.floats(0, 3))
slow = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@slow
@pytest.mark.filterwarnings("ignore:rsa is nan")
@given(problems, st.floats(0.05, 2), st.floats(0.001, 1), st.sampled_from(ORDERS))
def test_every_bound_holds_at_every_step(p, tau, eta, order):
    "paper >= a priori >= prior >= certificate >= drift, at a delta so small that a violation would be news; CKA and RSA above all their bounds"
    S, y, batches = p
    T, B = len(batches), len(batches[0])
    eta *= 4 * tau**2 * B
    for d in descend(S, y, batches, eta, tau, order):
        log = drift_bounds(d, y, B, T, delta=1e-12) | dict(true=(d.Sigma[0] - d.Sigma[1]).norm().log().item())
        chain = [np.exp(min(log[s], 700)) for s in ("true", "certificate", "prior", "apriori", "paper")]
        chain2 = [np.exp(min(log[s], 700)) for s in ("certificate", "certificate_sum", "apriori")]
        for low, high in [*zip(chain, chain[1:]), *zip(chain2, chain2[1:])]: assert low <= high * (1 + 1e-9) + 1e-12
        rows = {(r["metric"], r["source"]): r["value"] for r in snapshot(d, y, B, T, delta=1e-12)}
        for metric in ("cka", "rsa"):
            if math.isnan(rows[metric, "true"]): continue                # every similarity at -1: undefined, and said so
            assert max(v for (m, _), v in rows.items() if m == metric) <= rows[metric, "true"] + 1e-7
            assert rows[metric, "deviation"] >= max(rows[metric, "deviation_paper"], rows[metric, "certificate"]) - 1e-7
    assert d.Sigma.abs().max() <= 1 and torch.equal(d.Sigma[0].diagonal(), d.Sigma[1].diagonal())


@settings(slow, max_examples=60)
@given(problems, st.floats(0.05, 2), st.floats(0.1, 6), st.sampled_from(PAIRS), st.booleans())
def test_the_certificate_holds_for_any_two_objectives_and_any_step_size(p, tau, limits, pair, project):
    S, y, batches = p
    for d in descend(S, y, batches, limits * 4 * tau**2 * len(batches[0]), tau, pair, project):
        drift = (d.Sigma[0] - d.Sigma[1]).norm().item()
        assert drift <= d.c.norm().item() * (1 + 1e-9) + 1e-12 and d.c.norm().item() <= d.c_sum * (1 + 1e-9) + 1e-12


def test_swapping_the_objectives_changes_nothing():
    S, y, batches = problem(0, 20, 4, 12, 8)
    a, b = (list(descend(S, y, batches, 1.0, 0.3, order))[-1] for order in ORDERS)
    assert torch.equal(a.Sigma, b.Sigma.flip(0)) and torch.allclose(a.c, b.c, rtol=1e-12) and torch.equal(a.prior, b.prior)


def test_beyond_the_limit_the_form_without_a_factor_fails_and_the_corrected_one_holds():
    "Both runs start together, 1.2 times beyond 4 tau^2 B: the plain sum of mismatches falls below the true drift"
    S = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).double() * 0.2
    y, tau, plain = torch.tensor([0, 0, 1, 1]), 0.5, 0.0
    eta, d = 1.2 * 4 * tau**2 * 4, start(S, ("cl", "nscl"), tau, project=False)
    for _ in range(12):
        before = d.c_sum
        advance(d, torch.arange(4), y, eta)
        plain += d.c_sum - expansion(eta, tau, 4) * before
    drift = (d.Sigma[0] - d.Sigma[1]).norm().item()
    assert plain * (1 + 5e-5) < drift <= min(d.c.norm().item(), d.c_sum)


@pytest.mark.parametrize("just, grows", [(0.999, False), (1.001, True), (1.5, True)])
def test_the_limit_is_attained_by_one_objective_from_two_starts(just, grows):
    y, tau = torch.tensor([0, 0, 1, 1]), 0.1
    E = torch.tensor([[0, 0, 1, -1], [0, 0, -1, 1], [1, -1, 0, 0], [-1, 1, 0, 0]]).double()
    eta, ends = just * 4 * tau**2 * 4, []
    for sign in (1, -1):
        d = start(0.5 + sign * 1e-7 * E, ("nscl", "nscl"), tau)
        advance(d, torch.arange(4), y, eta)
        ends.append(d.Sigma[0])
    ratio = ((ends[0] - ends[1]).norm() / (2e-7 * E).norm()).item()
    assert (ratio > 1) == grows and ratio <= expansion(eta, tau, 4) + 1e-9 and ratio == pytest.approx(abs(eta / (2 * tau**2 * 4) - 1), rel=1e-5)


def test_the_certificate_is_close_where_theorem_1_is_not():
    "Balanced N = 400, C = 10, B = 256, tau = 0.5"
    S, y, _ = problem(0, 400, 10, 256, 1)
    rng = np.random.default_rng(0)
    d = list(descend(S, y, [rng.permutation(400)[:256] for _ in range(100)], 4.0, 0.5, every=100))[-1]
    drift, logs = (d.Sigma[0] - d.Sigma[1]).norm().item(), drift_bounds(d, y, 256, 100, 0.01)
    assert d.c.norm().item() < 1.5 * drift and d.c_sum < 2 * drift and logs["paper"] - math.log(drift) > math.log(1e3)


def test_equal_exposures_give_sqrt_N_instead_of_sqrt_B():
    N, B, tau, eta = 24, 6, 0.5, 0.3
    y = torch.arange(N) % 3
    S, _, _ = problem(1, N, 3, B, 1)
    batches = [np.random.default_rng(e).permutation(N // 3)[2 * k: 2 * k + 2][:, None] * 3 + np.arange(3) for e in range(5) for k in range(4)]
    d = list(descend(S, y, [b.flatten() for b in batches], eta, tau, every=100))[-1]       # stratified: |S| = 1 of 5
    bound = 20 * eta * Delta_sharp(1 / 5, tau) / (tau * math.sqrt(N))
    assert (d.Sigma[0] - d.Sigma[1]).norm() <= d.c.norm() <= d.prior.norm() <= bound * (1 + 1e-12)


def test_distinct_labels_make_cl_and_nscl_one():
    S, _, batches = problem(2, 12, 3, 8, 6)
    d = list(descend(S, np.arange(12), batches, 1.0, 0.1))[-1]
    assert torch.equal(d.Sigma[0], d.Sigma[1]) and d.c.norm() == d.c_sum == d.prior.norm() == 0


def test_drift_vanishes_as_the_classes_grow():
    N, drifts = 60, []
    S, _, _ = problem(3, N, 2, 30, 1)
    rng = np.random.default_rng(0)
    batches = [rng.permutation(N)[:30] for _ in range(10)]
    for C in (2, 5, 15, 30, 60):
        d = list(descend(S, np.arange(N) % C, batches, 1.0, 0.5, every=100))[-1]
        drifts.append((d.Sigma[0] - d.Sigma[1]).norm().item())
    assert np.all(np.diff(drifts) < 0) and drifts[-1] == 0


def test_untouched_entries_and_the_start_stay():
    S, y, batches = problem(4, 16, 4, 6, 1)
    before = S.clone()
    d = list(descend(S, y, batches, 5.0, 0.2))[-1]
    outside = torch.ones(16, 16, dtype=torch.bool); outside[np.ix_(batches[0], batches[0])] = False
    assert torch.equal(S, before) and all(torch.equal(X[outside], S.clamp(-1, 1)[outside]) for X in d.Sigma)


@pytest.mark.parametrize("objective", ["cl", "nscl", "ntxent", "scl"])
@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_a_block_has_the_value_of_the_view_losses(objective, tau):
    "On two identical views the row losses are the losses of the package"
    losses = pytest.importorskip("cl_nscl.losses")
    z = torch.nn.functional.normalize(torch.randn(10, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64), dim=1)
    y = torch.arange(10) % 4
    want = getattr(losses, f"{objective}_loss")(torch.stack([z, z]), y, tau)
    assert row_loss(z @ z.T, *row_weights(objective, y), tau).mean().item() == pytest.approx(want.item(), abs=1e-6)


@pytest.mark.parametrize("objective", ROW_WEIGHTS)
def test_the_batch_loss_is_convex_and_as_smooth_as_claimed(objective):
    tau, B, g = 0.4, 5, torch.Generator().manual_seed(0)
    W, P = row_weights(objective, torch.tensor([0, 1, 0, 2, 1]))
    for _ in range(10):
        x = torch.rand(B * B, generator=g, dtype=torch.float64) * 2 - 1
        H = torch.autograd.functional.hessian(lambda s: row_loss(s.view(B, B), W, P, tau).mean(), x)
        eigenvalues = torch.linalg.eigvalsh(H)
        assert eigenvalues.min() > -1e-10 and eigenvalues.max() <= 1 / (2 * tau**2 * B) + 1e-10


def test_ce_and_unknown_objectives_are_refused():
    S, y, batches = problem(0, 8, 2, 4, 1)
    with pytest.raises(ValueError, match="objective ce is not a function of similarities"): similarity_descent(S, y, batches, 1.0, 0.5, ("cl", "ce"))
    with pytest.raises(UserError, match="did you mean 'nscl'"): similarity_descent(S, y, batches, 1.0, 0.5, ("cl", "nsclx"))


def test_a_one_class_batch_is_refused_by_name():
    S, y, _ = problem(0, 8, 2, 4, 1)
    with pytest.raises(ValueError, match="holds only class 1"): similarity_descent(S, y, [np.flatnonzero(y == 1)], 1.0, 0.5)


@pytest.mark.parametrize("pair", PAIRS[:6])
def test_rows_are_tidy(pair):
    S, y, batches = problem(5, 12, 3, 8, 6)
    frame = similarity_descent(S, y, batches, np.linspace(1, 0.5, 6), 0.5, pair, every=4)
    assert list(frame) == ["step", "eta_sum", "pair", "metric", "source", "value"] and set(frame.step) == {0, 4, 6}
    assert not frame.duplicated(["step", "pair", "metric", "source"]).any() and frame.value.notna().all()
    assert ("paper" in set(frame.source)) == (set(pair) == {"cl", "nscl"})
    assert frame[frame.step == 6].eta_sum.iloc[0] == pytest.approx(np.linspace(1, 0.5, 6).sum())


def test_L15_a_smaller_batch_after_a_larger_one():
    S, y, _ = problem(6, 30, 3, 4, 1)
    one = list(descend(S, y, [range(20), range(20, 30)], 1.0, 0.5))[-1].Sigma.clone()
    two = list(descend(S, y, [range(20, 30), range(20)], 1.0, 0.5))[-1].Sigma                # disjoint blocks: the order is nothing
    assert torch.equal(one, two)


def test_M14_M08_constant_or_broken_matrices_are_refused():
    S, _, _ = problem(0, 8, 2, 4, 1)
    with pytest.raises(ValueError, match="the second matrix is constant"): matrix_rsa(S, torch.eye(8).double())
    with pytest.raises(ValueError, match="the first matrix is constant"): matrix_cka(torch.full((8, 8), 0.3).double(), S)
    with pytest.raises(ValueError, match="the second matrix must be finite"): matrix_cka(S, S * math.inf)


def test_a_run_that_ends_with_every_similarity_at_minus_one_says_that_rsa_is_undefined():
    S, y, _ = problem(0, 8, 2, 8, 1)
    with pytest.warns(UserWarning, match="rsa is nan: the first matrix is constant"):
        frame = similarity_descent(S, y, [range(8)] * 20, 4 * 2.0**2 * 8, 2.0, every=20)
    assert frame[(frame.metric == "rsa") & (frame.step == 20)].value.isna().all()


def test_M19_at_the_start_everything_is_equal():
    S, y, batches = problem(7, 12, 3, 8, 1)
    rows = pd.DataFrame(snapshot(start(S, ("cl", "nscl"), 0.5), y, 8, 1))
    assert np.allclose(rows[rows.metric.isin(["cka", "rsa"])].value, 1) and matrix_rho(S, S) == 0


def test_curvature_of_known_models():
    g = torch.Generator().manual_seed(0)
    A = torch.randn(6, 4, generator=g, dtype=torch.float64)
    w = torch.randn(4, generator=g, dtype=torch.float64)
    assert spectral_norm(lambda w: A @ w + 1, w, 100) == pytest.approx(torch.linalg.matrix_norm(A, 2).item(), rel=1e-6)
    Q = torch.linalg.qr(A[:4]).Q * torch.tensor([1.0, -3, 2, 0.5]).double() @ torch.linalg.qr(A[:4]).Q.T
    assert smoothness(lambda w: w @ Q @ w / 2 + w.sum(), w, 30) == pytest.approx(3, rel=1e-6)
    before = torch.get_rng_state(); spectral_norm(lambda w: A @ w, w, 2)
    assert torch.equal(before, torch.get_rng_state())
