"The bounds against brute force, limits, and each other, on random numbers."
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cl_nscl import bounds
from cl_nscl.bounds import (Delta, Delta_counts, Delta_sharp, cka_bound, certified, composition, corollary1, corollary2, eps, eps_sharp, expansion,
                            log_Delta, log_sharp_drift_path, log_theorem1, log_theorem1_path, log_theorem2, log_theorem2_path, loss_gap, max_eta_sum,
                            min_B, min_C, min_tau, rsa_bound, sharp_drift, softmax_share, theorem1, theorem2)

taus, shares = st.floats(0.05, 2), st.floats(0, 0.95)
schedules = st.lists(st.floats(0, 50), min_size=1, max_size=40)


@given(schedules, taus, st.integers(2, 1024), shares)
def test_the_recursion_never_exceeds_the_closed_form(eta, tau, B, a):
    for path, closed in [(log_theorem1_path(eta, tau, B, a, 0.01), log_theorem1(np.cumsum(eta), tau, B, a, 0.01)),
                         (log_theorem2_path(eta, 1 / tau, a), log_theorem2(np.cumsum(eta), 1 / tau, a))]:
        assert np.all((path[1:] <= closed) | np.isclose(path[1:], closed, rtol=1e-9, atol=1e-9))


@given(schedules, taus, st.integers(2, 1024), shares)
def test_the_recursion_in_logarithms_is_the_naive_loop(eta, tau, B, a):
    d, g = [0.0], Delta_sharp(a, tau) / (tau * math.sqrt(B))
    for e in eta: d.append(expansion(e, tau, B) * d[-1] + e * g)
    np.testing.assert_allclose(np.exp(log_sharp_drift_path(eta, tau, B, Delta_sharp(a, tau))), d, rtol=1e-9, atol=1e-300)


@given(st.floats(0, 200), st.floats(0.01, 2), st.integers(2, 4096), shares)
def test_ours_is_never_above_the_paper(eta_sum, tau, B, a):
    ours = sharp_drift(eta_sum, tau, B, Delta_sharp(a, tau))
    assert (math.log(ours) if ours else -math.inf) <= log_theorem1(eta_sum, tau, B, a, 0) + 1e-9


def test_low_temperatures_stay_finite_in_logarithms_and_refuse_as_numbers():
    log = log_theorem1(5000.0, 0.1, 256, 0.1, eps(1000, 256, 0.01))
    assert 900 < log < 1100
    with pytest.raises(OverflowError, match="log_theorem1"): theorem1(5000.0, 0.1, 256, 0.1, eps(1000, 256, 0.01))
    assert math.isfinite(log_theorem1(1.0, 1e-4, 256, 0.1, 0.1)) and math.isfinite(sharp_drift(1.0, 1e-4, 256, Delta_sharp(0.1, 1e-4)))


def test_infinite_only_where_the_priors_leave_no_other_class():
    assert theorem1(1.0, 0.5, 256, 0.6, 0.4) == math.inf and theorem1(1.0, 0.5, 256, 0.6, 0.399) < math.inf
    assert theorem1(0.0, 0.5, 256, 0.6, 0.4) == 0 and log_Delta(0.7, 0.9, 0.5) == math.inf


def monotone(v, up): return np.all(np.diff(v) > 0 if up else np.diff(v) < 0)


@settings(max_examples=50)
@given(taus, st.integers(64, 2048), st.integers(2, 200), st.floats(1, 100))
def test_every_arrow(tau, B, C, eta_sum):
    e, grid = 0.05, np.array([1.0, 1.5, 2, 4])
    share = lambda c: 1 / c + e
    assert monotone(log_theorem1(eta_sum, tau, B, 1 / (C * grid), e), up=False)
    assert monotone(log_theorem1(eta_sum, tau * grid, B, 1 / C, e), up=False)
    assert monotone(log_theorem1(eta_sum * grid, tau, B, 1 / C, e), up=True)
    ours = lambda eta_sum, tau, B, c: sharp_drift(eta_sum, tau, B, Delta_sharp(share(c), tau))
    assert np.all(np.diff(ours(eta_sum, tau, B, C * grid)) <= 0) and monotone(ours(eta_sum, tau * grid, B, C), up=False)
    assert monotone(ours(eta_sum * grid, tau, B, C), up=True) and monotone(ours(eta_sum, tau, B * grid, C), up=False)


@pytest.mark.parametrize("power, C, trend", [(0, 10, -1), (1 / 4, 10, -1), (1 / 2, 10, -1), (1, 10, 1), (0, 1000, -1), (1 / 4, 1000, -1), (1 / 2, 1000, -1)])
def test_batch_size_arrow_under_each_learning_rate_rule(power, C, trend):
    B = 2.0 ** np.arange(7, 14)
    assert np.all(np.sign(np.diff(log_theorem1(500 * 0.3 * (B / 256) ** power, 0.5, B, 1 / C, eps(500, B, 0.01)))) == trend)


def test_linear_rule_falls_first_when_the_composition_error_dominates():
    B = 2.0 ** np.arange(7, 14)
    steps = np.diff(log_theorem1(500 * 0.3 * B / 256, 0.5, B, 1 / 1000, eps(500, B, 0.01)))
    assert steps[0] < 0 < steps[-1]


def test_the_printed_eps_breaks_at_two_anchors_and_the_sharp_one_holds():
    delta, C, trials = 0.22, 4, 4000
    rng = np.random.default_rng(0)
    same = (rng.integers(0, C, (trials, 2)) @ [1, -1]) == 0            # share 1 for both anchors, or 0
    assert 1 / C + eps(1, 2, delta) < 1 and same.mean() > delta         # exceeds the promise more often than delta
    assert 1 / C + eps_sharp(1, 2, delta) > 1


@pytest.mark.parametrize("B, N", [(8, 64), (50, 200), (100, 1000)])
def test_corollary_3_holds_on_real_streams(B, N):
    y, rng, T, delta = np.arange(N) % 5, np.random.default_rng(1), 10, 0.3
    over = [composition(y, [rng.permutation(N)[:B] for _ in range(T)])["excess"] > eps_sharp(T, B, delta, N) for _ in range(100)]
    assert np.mean(over) <= delta


def test_stratified_batches_have_no_composition_error():
    y = np.arange(300) % 10
    found = composition(y, y.argsort(kind="stable").reshape(10, 10, 3).transpose(1, 0, 2).reshape(10, 30))    # 3 of each class in every batch
    assert found["share"] <= 1 / 10 and found["share"] == pytest.approx((30 / 10 - 1) / 29)


@given(st.integers(1, 6), st.integers(1, 6), taus, st.integers(0, 10**6))
def test_mismatch_identity_and_both_bounds(n, m, tau, seed):
    rng = np.random.default_rng(seed)
    x = np.where(rng.random(n + m) < 0.5, rng.uniform(-1, 1, n + m), rng.choice([-1.0, 1.0], n + m)) / tau
    p = np.exp(x - x.max()); p /= p.sum()
    q = np.concatenate([np.zeros(n), np.exp(x[n:] - x[n:].max())]); q /= q.sum()
    assert np.abs(p - q).sum() == pytest.approx(2 * p[:n].sum(), abs=1e-12)
    assert p[:n].sum() <= softmax_share(n / (n + m), tau) * (1 + 1e-12)
    assert np.linalg.norm(p - q) <= Delta_counts(n, m, tau) * (1 + 1e-12) <= Delta_sharp(n / (n + m), tau) * (1 + 1e-11)


def test_the_largest_difference_is_not_bounded_by_the_largest_probability():
    p, q = np.full(10, 0.1), np.eye(10)[9]                              # |S| = 9, |A| = 1, equal similarities
    assert np.abs(p - q).max() == pytest.approx(0.9) and np.abs(p - q).max() > math.exp(2 / 2.0) / 10


def test_mismatch_limits():
    assert Delta_counts(1, 1, 0.5) == pytest.approx(math.sqrt(2) / (1 + math.exp(-4)))
    assert Delta_counts(3, 7, 1e9) == pytest.approx(0.3 * math.sqrt(1 / 3 + 1 / 7))                       # attained by equal similarities
    for C in (1e3, 1e9): assert Delta(1 / C, 0, 0.5) < 200 / C and Delta_sharp(1 / C, 0.5) < 100 / C and Delta_counts(1, C, 0.5) < 100 / C


@given(st.integers(2, 12), st.floats(0, 3), st.integers(0, 10**6))
def test_similarities_never_fall_below_their_bounds(n, scale, seed):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=n * n); b = a + scale * rng.normal(size=n * n) * rng.choice([1, 1e-3])
    a, b = a - a.mean(), b - b.mean()
    cos, rho = a @ b / np.linalg.norm(a) / np.linalg.norm(b), np.linalg.norm(b - a) / np.linalg.norm(a)
    assert cos >= cka_bound(rho) - 1e-7 and cos >= rsa_bound(rho) - 1e-7                                  # sqrt(1 - rho^2) loses digits near 0
    assert corollary1(rho) <= cka_bound(rho) + 1e-12 and corollary2(rho) <= rsa_bound(rho) + 1e-12


@pytest.mark.parametrize("theta", [1e-3, 0.3, 0.8, 1.2, 1.57])
def test_the_sharp_corollary_is_attained(theta):
    k, f = np.array([3.0, 4, 0]), np.array([0, 0, 1.0])
    k2 = math.cos(theta) * (math.cos(theta) * k + 5 * math.sin(theta) * f)
    rho = np.linalg.norm(k2 - k) / 5
    assert k @ k2 / 5 / np.linalg.norm(k2) == pytest.approx(cka_bound(rho), abs=1e-9) and rho == pytest.approx(math.sin(theta))


def test_corollary_1_as_printed_fails_beyond_one_without_semidefinite_kernels():
    x = 0.1
    assert (1 - (1 + x)) / (1 + (1 + x)) > -1 == corollary1(1 + x) == cka_bound(1 + x)                    # K' = -xK has CKA -1
    assert corollary1(1 + x, psd=True) == cka_bound(1 + x, psd=True) == 0


@pytest.mark.parametrize("tau", [0.1, 0.5, 1.0])
def test_L07_the_loss_gap_lies_between_zero_and_its_bound(tau):
    "12 images in 4 classes, two views each: 4 same-class and 18 other-class views"
    z = np.random.default_rng(0).normal(size=(24, 8)); z /= np.linalg.norm(z, axis=1, keepdims=True)
    img, cls, E = np.arange(24) % 12, np.arange(24) % 4, np.exp(z @ z.T / tau)
    gap = np.log((E * (img[:, None] != img)).sum(1) / (E * (cls[:, None] != cls)).sum(1))
    assert 0 <= gap.mean() and gap.max() <= loss_gap(4, 18, tau)
    assert loss_gap(1, 9, 1.0) == pytest.approx(math.log(1 + math.e**2 / 9)) and loss_gap(0, 9, tau) == 0


@settings(max_examples=50)
@given(st.floats(0, 0.99), st.floats(1, 1e3), st.floats(0.1, 2), st.integers(2, 4096), st.floats(0.001, 0.9))
def test_prescriptions_stand_on_the_edge(target, norm, tau, rows, share):
    budget = max_eta_sum(target, norm, tau, rows, share)
    assert certified(norm, budget * (1 - 1e-9), tau, rows, share) >= target - 1e-6 and certified(norm, budget * 1.01, tau, rows, share) < target
    C = min_C(target, norm, budget, tau, rows, 0.0)
    assert certified(norm, budget * (1 - 1e-9), tau, rows, 1 / C) >= target - 1e-6
    if C > 2: assert certified(norm, budget * (1 + 1e-9), tau, rows, 1 / (C - 1)) <= target + 1e-6
    edge = min_tau(target, norm, budget, rows, share)
    assert edge == pytest.approx(tau, rel=1e-6)


def test_smallest_batch():
    B = min_B(0.9, 100.0, 1000.0, 1.0, 0.1, 1000, 0.01)
    at = lambda B: certified(100.0, 1000.0, 1.0, B, 0.1 + eps_sharp(1000, B, 0.01))
    assert at(B) >= 0.9 > at(B - 1)
    assert min_C(0.9, 1.0, 1e9, 0.1, 256, 0.3) == math.inf


@pytest.mark.parametrize("call, name", [
    (lambda: eps(0, 256, 0.1), "T"), (lambda: eps(1, 1, 0.1), "B"), (lambda: eps(1, 256, 0.0), "delta"), (lambda: eps(1, 256, [0.1, 1.0]), "delta"),
    (lambda: eps_sharp(1, 1, 0.1), "B"), (lambda: eps_sharp(1, 8, 0.1, N=4), "N"), (lambda: Delta(0.1, 0.1, 0), "tau"), (lambda: Delta(0.1, 0.1, -1), "tau"),
    (lambda: Delta(1.1, 0, 1), "pi_max"), (lambda: Delta(0.1, -0.1, 1), "eps"), (lambda: theorem1(1, math.nan, 256, 0.1, 0), "tau"),
    (lambda: theorem1(-1, 0.5, 256, 0.1, 0), "eta_sum"), (lambda: theorem1(1, 0.5, 1, 0.1, 0), "B"), (lambda: log_theorem1_path([1, -1], 0.5, 4, 0.1, 0), "eta"),
    (lambda: theorem2(1, -1, 1), "beta"), (lambda: theorem2(1, 1, -1), "gap"), (lambda: corollary1(-1), "rho"), (lambda: corollary2(-1), "r"),
    (lambda: loss_gap(1, 0, 1), "n_diff"), (lambda: bounds.largest_prior([0.5, 0.6]), "priors"), (lambda: bounds.largest_prior(C=1), "C"),
    (lambda: sharp_drift(1, 0, 256, 1), "tau"), (lambda: certified(0, 1, 1, 256, 0.1), "norm"), (lambda: max_eta_sum(1.0, 1, 1, 256, 0.1), "target")])
def test_bad_arguments_are_named(call, name):
    with pytest.raises(ValueError, match=rf"^{name} must"): call()


def test_arrays_broadcast():
    assert eps([[10], [20]], [64, 128, 256], 0.1).shape == (2, 3)
    assert log_theorem1(np.ones((4, 1)), 0.5, 256, np.full(3, 0.1), 0.01).shape == (4, 3)
    assert certified(np.ones(5), 0.1, 1.0, 256, 0.1).shape == (5,) and isinstance(certified(1.0, 0.1, 1.0, 256, 0.1), float)
