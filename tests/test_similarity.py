"""Similarity against direct N x N computations, its invariances, its numerics, and known faults of the field."""
import itertools, math, warnings

import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st

from cl_nscl.core import generator
from cl_nscl.similarity import METRICS, Similarity, _unit, cka, drift, rsa, similarities, spearman


def normal(*shape, seed=0, dtype=torch.float32): return torch.randn(*shape, generator=generator(seed, "test", *shape), dtype=dtype)
def rotation(d, seed=0): return torch.linalg.qr(normal(d, d, seed=seed, dtype=torch.float64))[0]
def values(h1, h2, **kw): return similarities({"a": h1, "b": h2}, **kw).set_index("metric").value


def direct(h1, h2, kernel="cosine"):
    "N x N in float64, every difference from M and D, every distance from centred rows."
    N, off = len(h1), ~torch.eye(len(h1), dtype=bool)
    u = [_unit(h.double()) if kernel == "cosine" else h.double() for h in (h1, h2)]
    v = [x - x.mean(0) for x in u]
    if u[0].shape == u[1].shape:
        dS = (u[0] + u[1]) / 2 @ (u[1] - u[0]).T
        dS = dS + dS.T
    else: dS = u[1] @ u[1].T - u[0] @ u[0].T
    dK = dS - dS.mean(0) - dS.mean(1, keepdim=True) + dS.mean()
    K, L = [x @ x.T for x in v]
    far = [((w := x.square().sum(1))[:, None] + w)[off] / 2 - k[off] for x, k in zip(v, (K, L))]
    a, b = [f - f.mean() for f in far]
    def hsic(A, B):
        A, B = A * off, B * off
        return (A * B).sum() + A.sum() * B.sum() / (N - 1) / (N - 2) - 2 / (N - 2) * (A.sum(0) @ B.sum(0))
    return {"cka": (K * L).sum() / (K.norm() * L.norm()), "cka_debiased": hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt(),
            "rsa": a @ b / (a.norm() * b.norm()), "drift": dS.norm(), "rho": dK.norm() / K.norm(), "r": dS[off].norm() / a.norm()}


def agree(h1, h2, tol=1e-6, **kw):
    "Every metric within `tol`: absolute for cosines, relative to the larger of itself and 1e-6 for lengths."
    found, want = values(h1, h2, **kw), direct(h1, h2)
    for m, x in want.items():
        scale = 1 if m in ("cka", "cka_debiased", "rsa") else max(float(x), 1e-12)
        assert abs(found[m] - float(x)) <= tol * scale, (m, found[m], float(x))
    if "cka_linear" in found: assert abs(found["cka_linear"] - float(direct(h1, h2, "linear")["cka"])) <= tol


@pytest.mark.parametrize("N, d1, d2", [(5, 3, 3), (40, 64, 64), (40, 100, 7), (500, 32, 32), (1500, 48, 48), (2500, 24, 40)])
def test_direct_computation_agrees(N, d1, d2):
    x = normal(N, d1)
    agree(x, x[:, :d2] + normal(N, d2, seed=1) if d2 <= d1 else normal(N, d2, seed=1), tol=1e-7)


@pytest.mark.parametrize("noise", [1, 1e-1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("N", [300, 2000])
def test_near_equal_models_keep_their_digits(noise, N):
    x = normal(N, 32, dtype=torch.float64)
    agree(x, x + noise * normal(N, 32, seed=1, dtype=torch.float64))


def test_one_minus_cka_of_near_equal_models():
    x = normal(2000, 32, dtype=torch.float64)
    y = x + 1e-3 * normal(2000, 32, seed=1, dtype=torch.float64)
    rho2, gap = 1 - values(x, y)["cka"], 1 - float(direct(x, y)["cka"])
    assert abs(rho2 / gap - 1) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype):
    x = normal(1500, 32)
    agree(x.to(dtype), (x + 0.3 * normal(1500, 32, seed=1)).to(dtype))


@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
@pytest.mark.parametrize("offset", [0, 1e4])
def test_offsets_and_scales(scale, offset):
    x, y = normal(1500, 32), normal(1500, 32, seed=1)
    agree((x + offset) * scale, (x + y + offset) / scale)


def test_rows_near_the_ends_of_float64():
    x, y = normal(100, 8, dtype=torch.float64), normal(100, 8, seed=1, dtype=torch.float64)
    scale = 10.0 ** torch.linspace(-200, 200, 100, dtype=torch.float64)[:, None]
    assert np.allclose(values(x * scale, (x + y) / scale, kernels=("cosine",)), values(x, x + y, kernels=("cosine",)), rtol=1e-12)


@pytest.mark.parametrize("first", [1e3, 1e6])
def test_first_rows_unlike_the_rest(first):
    x, y = normal(2500, 16), normal(2500, 16, seed=1)
    x[:1024] += first
    agree(x, x + y)


def test_outlying_first_rows_are_refused_where_digits_are_lost():
    x, y = normal(200_000, 2), normal(200_000, 2, seed=1)
    x[:1024] += 1e7
    def run(products):
        sim = Similarity(["a", "b"], ("linear",), products)
        sim.update([x, y])
        return sim.result().pairs().value[0]
    with pytest.raises(ValueError, match="model 'a': its first rows are unlike the rest.*shuffle the rows"): run(None)
    u, v = [h.double() - h.double().mean(0) for h in (x, y)]
    assert abs(run(torch.float64) - float((u.T @ v).square().sum() / (u.T @ u).norm() / (v.T @ v).norm())) < 1e-6


def test_low_rank_features():
    low = normal(1500, 3) @ normal(3, 40)
    agree(low + 0.01 * normal(1500, 40), low + 0.01 * normal(1500, 40, seed=1))


def test_autocast_and_lowered_precision_change_nothing():
    x, y = normal(2500, 32), normal(2500, 32, seed=1)
    want = values(x, x + y)
    with torch.autocast("cpu", dtype=torch.bfloat16): assert (values(x, x + y) - want).abs().max() < 1e-9
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try: agree(x, x + y)
    finally: torch.set_float32_matmul_precision(before)


def test_rotated_copy_is_resolved_or_refused():
    x = normal(2500, 32, dtype=torch.float64)
    y = x @ rotation(32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = values(x, y)
    assert math.isnan(found["drift"]) and "products=torch.float64" in str(said[0].message)
    assert abs(found["cka"] - 1) < 1e-6 and abs(found["rsa"] - 1) < 1e-6
    assert drift(x, y) <= 1e-6 * float((_unit(x).T @ _unit(x)).norm())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(6, 40), st.integers(2, 12))
def test_invariances(seed, N, d):
    x, y = normal(N, d, seed=seed, dtype=torch.float64), normal(N, d + 1, seed=seed, dtype=torch.float64)
    want = values(x, y)
    order = torch.randperm(N, generator=generator(seed, "order"))
    for other in (values(x @ rotation(d, seed), y), values(3e4 * x, 1e-5 * y), values(x[order], y[order])):
        assert np.allclose(other, want, rtol=1e-8, atol=1e-8)
    back = values(y, x)
    for m in ("cka", "cka_linear", "cka_debiased", "rsa", "drift"): assert abs(back[m] - want[m]) < 1e-9 * max(1, abs(want[m]))


def test_chunks_and_many_models():
    hs = {"a": normal(3000, 16), "b": normal(3000, 16) + 0.1 * normal(3000, 16, seed=1), "c": normal(3000, 9, seed=2), "d": normal(3000, 16) + 0.1 * normal(3000, 16, seed=1)}
    whole, sim, i = similarities(hs), Similarity(list(hs)), 0
    for n in itertools.cycle([1, 700, 33, 1500]):
        sim.update([h[i:i + n] for h in hs.values()], ids=np.arange(i, min(i + n, 3000)))
        if (i := i + n) >= 3000: break
    chunked = sim.result().pairs()
    assert np.allclose(chunked.value, whole.value, rtol=1e-6, atol=1e-7)
    equal = whole[(whole.a == "b") & (whole.b == "d")].set_index("metric").value
    assert equal["drift"] == 0 and equal["rho"] == 0 and equal["cka"] == 1
    for a, b in itertools.combinations(hs, 2):
        part = whole[(whole.a == a) & (whole.b == b)].set_index("metric").value
        assert np.allclose(part[list(METRICS)], values(hs[a], hs[b])[list(METRICS)], rtol=1e-6, atol=1e-7)


def test_results_so_far_do_not_disturb_the_rest():
    x, y = normal(2500, 8), normal(2500, 8, seed=1)
    sim = Similarity(["a", "b"])
    sim.update([x[:1100], y[:1100]]); sim.result(); sim.update([x[1100:], y[1100:]])
    assert np.allclose(sim.result().pairs().value, values(x, y)[list(METRICS)], rtol=1e-6, atol=1e-7)


def test_global_generator_is_untouched():
    state = torch.get_rng_state()
    spearman(normal(100, 4), normal(100, 4, seed=1), pairs=50)
    values(normal(100, 4), normal(100, 4, seed=1))
    assert torch.equal(state, torch.get_rng_state())


def test_second_library_agrees():
    cka_base = pytest.importorskip("ckatorch.core").cka_base
    x, y = normal(300, 20), normal(300, 30, seed=1)
    for debiased in (False, True):
        assert abs(cka(x, y, "linear", debiased) - float(cka_base(x, y, unbiased=debiased))) < 1e-9
        assert abs(cka(x, y, debiased=debiased) - float(cka_base(_unit(x.double()), _unit(y.double()), unbiased=debiased))) < 1e-9


# Known faults


def test_M01_offset_does_not_change_linear_cka():
    x = normal(200, 16)
    y = x + normal(200, 16, seed=1)
    for c in (1e3, 1e4): assert abs(cka(x, y, "linear") - cka(x + c, y + c, "linear")) < 1e-3


def test_M03_plug_in_cka_is_inflated_when_d_exceeds_N():
    pairs = [(normal(32, 512, seed=s), normal(32, 512, seed=s + 100)) for s in range(20)]
    assert abs(np.mean([cka(*p, "linear") for p in pairs]) - 0.94) < 0.01
    assert abs(np.mean([cka(*p, "linear", debiased=True) for p in pairs])) < 0.05
    sim = Similarity(["a", "b"]); sim.update(list(pairs[0])); found = sim.result()
    assert (found.N, found.d) == (32, [512, 512])


def test_M05_diagonal_is_zeroed_not_subtracted_as_a_vector():
    for seed in range(20):                                                   # the fault makes this negative always
        x = normal(6, 2, seed=seed)
        assert cka(x, x, "linear", debiased=True) == 1
    x, y = normal(6, 2), normal(6, 3, seed=1)
    assert abs(cka(x, y, "linear", debiased=True) - float(direct(x, y, "linear")["cka_debiased"])) < 1e-10


@pytest.mark.parametrize("kernel", ["cosine", "linear"])
def test_M07_what_leaves_cka_alone(kernel):
    x = normal(100, 10, dtype=torch.float64)
    for y in (x, 2 * x, x @ rotation(10)): assert abs(cka(x, y, kernel) - 1) < 1e-12
    assert cka(x, x @ normal(10, 10, seed=3, dtype=torch.float64), kernel) < 0.99


@pytest.mark.parametrize("constant", [torch.ones(50, 4), torch.arange(1, 51.)[:, None] * torch.ones(4)])
def test_M08_constant_features_name_their_model(constant):
    for a, b, side in ((constant, normal(50, 4), "h1"), (normal(50, 4), constant, "h2")):
        with pytest.raises(ValueError, match=f"{side}.*constant"): cka(a, b)
    with pytest.raises(ValueError, match="h1.*constant"): cka(torch.full((50, 4), 0.1), normal(50, 4), "linear")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_M08_not_finite_names_model_and_row(bad):
    x = normal(50, 4)
    x[7, 2] = bad
    for stat in (cka, rsa, drift, spearman):
        with pytest.raises(ValueError, match="'h2', row 7: NaN or infinite"): stat(normal(50, 4), x)


def test_M10_other_order_of_the_samples():
    x, order = normal(30, 4), torch.randperm(30, generator=generator(0, "order"))
    sim = Similarity(["cl", "nscl"])
    with pytest.raises(ValueError, match="model 'nscl', row 0 .*another id"): sim.update([x, x[order]], ids=[torch.arange(30), order])
    sim.update([x, x[order][order.argsort()]], ids=[torch.arange(30), order[order.argsort()]])
    found = sim.result().pairs().set_index("metric").value
    assert found["cka"] == 1 and found["rsa"] == 1


@pytest.mark.parametrize("names, ids, says", [
    ("ab", [range(30)], "1 lists of ids for the 2 models"), ("ab", [range(30)] * 3, "3 lists of ids for the 2 models"),
    ("abc", [range(30)] * 2, "2 lists of ids for the 3 models"), ("ab", [[0] * 30] * 2, "0 comes twice"), ("ab", [*range(29), 5], "5 comes twice"),
    ("ab", [None, [*range(30)]], "model 'a': ids must be a list"), ("ab", dict.fromkeys(range(30)), "ids must be a list"), ("ab", torch.zeros(30, 2).long(), "ids must be a list"),
    ("ab", [range(30), range(29)], "model 'b': 29 ids for 30 rows")])
def test_M10_ids_that_check_nothing_are_refused(names, ids, says):
    "Too few lists, or an id twice: rows in another order, or of another number, would pass."
    sim = Similarity(names)
    with pytest.raises(ValueError, match=says): sim.update([normal(30, 4)] * len(names), ids=ids)
    assert sim.N == 0


def test_M10_an_id_comes_once_in_all_chunks():
    sim = Similarity("ab")
    sim.update([normal(30, 4)] * 2, ids=range(30))
    with pytest.raises(ValueError, match="29 comes twice"): sim.update([normal(30, 4)] * 2, ids=range(29, 59))
    sim.update([normal(30, 4)] * 2, ids=range(30, 60))


def test_M11_unequal_row_counts():
    for stat in (cka, rsa, drift, spearman):
        with pytest.raises(ValueError, match="'h2': 120 rows, but model 'h1' has 100"): stat(normal(100, 4), normal(120, 4))
    with pytest.raises(ValueError, match="1 lists of ids"): Similarity("ab").update([normal(100, 4), normal(120, 4)], ids=[range(100)])


def test_M12_diagonal_is_left_out_of_rsa():
    A, B, C = [torch.tensor(x).float() for x in ([[1, 0], [0, 1], [-1, 0]], [[1, 0], [1, 1], [0, 1]], [[1, 0], [0, 1], [1, 1]])]
    assert abs(rsa(A, C) + 0.5) < 1e-7 and abs(rsa(A, B) - 1) < 1e-7


def test_M14_constant_dissimilarities():
    for h in (torch.eye(6), torch.eye(6) * torch.arange(1, 7.)):
        with pytest.raises(ValueError, match="h1.*do not vary"): rsa(h, normal(6, 6))
        with pytest.raises(ValueError, match="h1.*all equal"): rsa(h, normal(6, 6), "spearman")
    with pytest.raises(ValueError, match="h2.*constant"): rsa(normal(6, 6), torch.ones(6, 6))


@pytest.mark.parametrize("N", [6, 30, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_M14_constant_up_to_the_rounding_of_the_data_type(dtype, N):
    "A simplex in any position: rounding its entries leaves noise that is no structure."
    h = ((torch.eye(N, dtype=torch.float64) - 1 / N) @ rotation(N)).to(dtype)
    for stat in (rsa, lambda a, b: cka(a, b, debiased=True)):
        with pytest.raises(ValueError, match="h1.*do not vary"): stat(h, normal(N, 4))
        assert abs(stat(normal(N, 4).to(dtype), normal(N, 4)) - 1) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_M15_ties_do_not_depend_on_rounding(dtype):
    one = normal(1, 50, dtype=dtype)
    x = torch.cat([one * (1 + torch.arange(30, dtype=dtype)[:, None] / 7), normal(1, 50, seed=1, dtype=dtype)])
    y = normal(31, 50, seed=2, dtype=dtype)
    exact = torch.zeros(31, 50, dtype=torch.float64); exact[:30, 0] = 1; exact[30] = _unit(x[30:].double())
    got = [spearman(x, y, chunk=c)["value"] for c in (7, 16, 64)]
    assert np.ptp(got) < 1e-6
    ties = torch.eye(2, dtype=torch.float64)[(torch.arange(31) == 30).long()]                    # the same ties, exactly
    assert abs(got[0] - spearman(ties, y.double())["value"]) < 1e-3


def test_M16_offset_keeps_distances():
    z = normal(60, 8)
    a, b = values(z, z + 1e-3 * normal(60, 8, seed=1)), values(z + 1e4, z + 1e-3 * normal(60, 8, seed=1) + 1e4)
    assert a["rsa"] > 0.999 and b["rsa"] > 0.99 and b["cka_linear"] > 0.999
    agree(z + 1e4, z + normal(60, 8, seed=1) + 1e4)


def test_M17_streaming_equals_dense_and_needs_no_n_by_n():
    agree(normal(500, 64), normal(500, 64) + normal(500, 64, seed=1))
    import resource
    sim, x, y = Similarity(["a", "b"]), normal(1000, 64), normal(1000, 64, seed=1)
    sim.update([x, y])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(49): sim.update([x, y])
    assert sim.result().N == 50_000 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000      # kB
    part = spearman(x.repeat(5, 1), (x + y).repeat(5, 1) + 0.1, pairs=2000)
    assert part["pairs"] == 2000 and part["error"] > 0


def test_M03_tables_say_of_how_many_rows_and_features():
    found = similarities({"a": normal(32, 4), "b": normal(32, 512)})
    assert set(zip(found.N, found.d_a, found.d_b)) == {(32, 4, 512)}


def test_M08_features_of_any_scale_and_no_truth_values():
    x, y = normal(50, 4, dtype=torch.float64), normal(50, 3, seed=1)
    for scale in (1e200, 1e-200): assert abs(cka(x * scale, y, "linear") - cka(x, y, "linear")) < 1e-12
    for method in ("pearson", "spearman"):
        with pytest.raises(ValueError, match="'h1': features must be real.*bool"): rsa(x > 0, y, method)


def test_M12_too_few_rows_or_pairs():
    x = normal(50, 4)
    for method in ("pearson", "spearman"):
        with pytest.raises(ValueError, match="rsa: needs at least 3 rows, not [12]|at least 2 rows"): rsa(x[:1], x[:1], method)
    for pairs in (0, 3, -1, 1e5):
        with pytest.raises(ValueError, match=f"pairs = {pairs}: must be a whole number, at least 4".replace("+", r"\+")): spearman(x, x, pairs=pairs)
    with pytest.raises(ValueError, match="chunk = 0"): spearman(x, x, chunk=0)


def test_M17_ranks_of_a_thousand_million_pairs_are_refused():
    x = normal(50_000, 2)
    with pytest.raises(ValueError, match="1,249,975,000 pairs takes about 175 GiB"): spearman(x, x, pairs=10**10)


def test_M19_twins_at_step_zero():
    x = torch.relu(normal(3000, 32))
    found = values(x, x.clone())
    assert all(abs(found[m] - 1) < 1e-6 for m in ("cka", "cka_linear", "cka_debiased", "rsa"))
    assert found["drift"] == found["rho"] == found["r"] == 0


@pytest.mark.parametrize("make, says", [
    (lambda: Similarity(["a", "a"]), "must be different"), (lambda: Similarity([]), "at least one"),
    (lambda: similarities({"a": normal(1, 4), "b": normal(1, 4, seed=1)}), "at least 2 rows"),
    (lambda: cka(normal(3, 4), normal(3, 4, seed=1), debiased=True), "at least 4 rows"), (lambda: rsa(normal(2, 4), normal(2, 4, seed=1)), "at least 3 rows"),
    (lambda: cka(normal(9), normal(9)), "features must be real and"), (lambda: cka(normal(0, 4), normal(0, 4)), "n, d >= 1"),
    (lambda: cka(normal(9, 4) * (torch.arange(9) != 4)[:, None], normal(9, 4)), "model 'h1', row 4: all zero"),
    (lambda: rsa(normal(9, 4), normal(9, 4), "kendall"), "valid: pearson, spearman"), (lambda: cka(normal(9, 4), normal(9, 4), "rbf"), "valid: cosine, linear")])
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says): make()


def test_zero_rows_are_fine_for_the_linear_kernel():
    x = normal(50, 4) * (torch.arange(50) % 5 != 0)[:, None]
    assert abs(cka(x, normal(50, 4), "linear") - float(direct(x + 0, normal(50, 4), "linear")["cka"])) < 1e-9
