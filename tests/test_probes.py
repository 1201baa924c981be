"""Probes: known faults, scikit-learn as a second opinion, refusals."""
import math, warnings

import numpy as np, pytest, torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from cl_nscl import probes
from cl_nscl.core import generator
from cl_nscl.data import load_dataset
from cl_nscl.probes import (Probe, class_centres, confusion, fit_linear_probe, knn, knn_loo, linear_probe, nccc,
                            nccc_few_shot, nearest_centre, shots)


def clouds(n=40, C=4, d=6, seed=0, spread=1.5, offset=0.0):
    centres, y = torch.randn(C, d, generator=generator(0, "centres")), torch.arange(C).repeat(n)
    return centres[y] + spread * torch.randn(C * n, d, generator=generator(seed, "rows")) + offset, y


TRAIN, TEST = clouds(), clouds(seed=1)
SIDES = torch.tensor([-1.0, 1.0]).repeat(10)[:, None], torch.tensor([0, 1]).repeat(10)


@pytest.mark.parametrize("accuracy", [nccc, linear_probe, lambda *a: linear_probe(*a, reg=0.1)], ids=["nccc", "linear", "fixed lambda"])
def test_E03_test_statistics_are_never_used(accuracy):
    "Training rows -1 and +1, test rows shifted by 3: half is right; standardised by its own statistics all of the test would be."
    h, y = SIDES
    assert accuracy(h, y, h + 3, y) == 0.5
    assert accuracy(h, y, (h + 3) - (h + 3).mean(), y) == 1.0


@pytest.mark.parametrize("width", [1, 5])
def test_E03_rows_of_another_width_are_refused(width):
    "One column would be spread over all columns of the training rows, and score something."
    h, y, narrow = *TRAIN, TEST[0][:, :width]
    probe = fit_linear_probe(h, y, reg=0.01)
    for score in (lambda: nccc(h, y, narrow, y), lambda: nccc_few_shot(h, y, narrow, y, 3), lambda: knn(h, y, narrow, y),
                  lambda: probe.score(narrow, y), lambda: probe.loss(narrow, y), lambda: probe.logits(narrow), lambda: linear_probe(h, y, narrow, y)):
        with pytest.raises(ValueError, match=rf"must be \[M, 6\] like the training rows, not \[160, {width}\]"): score()


def test_E05_a_subset_of_classes_is_scored_on_its_own_labels():
    "Classes [7, 2] of ten: labels 0 and 1 inside, predictions in the source's ids, other rows excluded and counted, a 2 x 2 table."
    ds = load_dataset("digits", classes=(7, 2), size=8)
    h, t = (s.x.flatten(1).float() for s in (ds.train, ds.test))
    assert sorted(ds.train.y.unique().tolist()) == [0, 1] and ds.excluded == 1797 - len(ds.train) - len(ds.test)
    probe = fit_linear_probe(h, ds.train.y, reg=0.01)
    guess = probe.predict(t)
    assert set(ds.original(guess).tolist()) == {7, 2}
    table = confusion(ds.test.y, guess, ds.C)
    assert table.shape == (2, 2) and int(table.sum()) == len(ds.test)
    assert float(table.diagonal().sum()) / len(ds.test) == probe.score(t, ds.test.y) > 0.95
    ids = ds.original(ds.train.y)                                  # trained on the source's ids: the same hits under other names
    assert torch.equal(fit_linear_probe(h, ids, reg=0.01).predict(t), ds.original(guess))


def test_E07_repeats_differ_reruns_agree_and_classes_draw_apart():
    y = torch.arange(5).repeat_interleave(20)
    state = torch.random.get_rng_state()
    draws = [shots(y, 5, seed=0, repeat=r) for r in range(5)]
    assert len({tuple(d.tolist()) for d in draws}) == 5
    assert all(torch.equal(d, shots(y, 5, seed=0, repeat=r)) for r, d in enumerate(draws))
    patterns = {tuple(d.view(5, 5)[c].remainder(20).tolist()) for d in draws for c in range(5)}
    assert len(patterns) == 25
    few = nccc_few_shot(*TRAIN, *TEST, n_shot=2, repeats=5, seed=0)
    assert np.std(few) > 0 and few == nccc_few_shot(*TRAIN, *TEST, n_shot=2, repeats=5, seed=0) != nccc_few_shot(*TRAIN, *TEST, n_shot=2, repeats=5, seed=1)
    assert torch.equal(state, torch.random.get_rng_state())


def test_E07_more_repeats_keep_the_first_ones():
    assert nccc_few_shot(*TRAIN, *TEST, 2, repeats=3) == nccc_few_shot(*TRAIN, *TEST, 2, repeats=6)[:3]


def test_E08_more_shots_than_rows_are_refused():
    h, y = clouds(20)
    with pytest.raises(ValueError, match="n_shot = 500: must be a whole number, at least 1 and at most 20"): nccc_few_shot(h, y, *TEST, n_shot=500)
    with pytest.raises(ValueError, match="at most 1, the training rows of class 3"): nccc_few_shot(h[:7], torch.tensor([0, 0, 1, 1, 2, 2, 3]), *TEST, n_shot=2)


def test_E08_counts_are_whole_and_labels_may_be_any_list():
    h, y = clouds(20)
    assert shots(y.tolist(), 2).equal(shots(y, 2)) and shots(y.numpy(), 2).equal(shots(y, 2))
    with pytest.raises(ValueError, match="N > 0"): shots(y[:0], 2)
    for n in (2.5, 0, -1, "2"):
        with pytest.raises(ValueError, match=f"n_shot = {n}: must be a whole number"): nccc_few_shot(h, y, *TEST, n_shot=n)
        with pytest.raises(ValueError, match=f"k = {n}: must be a whole number"): knn(h, y, *TEST, k=n)


def test_E09_leave_one_out_does_not_find_itself():
    h, y = torch.randn(200, 16, generator=generator(0, "E09")), torch.randint(10, (200,), generator=generator(0, "E09", 1))
    assert knn(h, y, h, y, 1) == 1.0
    assert knn_loo(h, y, 1) < 0.2
    assert knn_loo(h.repeat(2, 1), y.repeat(2), 1) == 1.0           # a true duplicate is another row, and counts


class Late:
    "Labels that may not be looked at before `ready`."
    ready = False
    def __init__(self, y): self.y = y
    def __array__(self, *a, **k):
        assert Late.ready, "test labels read early"
        return self.y.numpy()


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_E12_test_labels_are_read_after_the_choice(solver, monkeypatch):
    fit = probes.fit_linear_probe
    def then_ready(*a, **k):
        out = fit(*a, **k)
        Late.ready = True
        return out
    monkeypatch.setattr(probes, "fit_linear_probe", then_ready)
    monkeypatch.setattr(Late, "ready", False)
    late = Late(TEST[1])
    with pytest.raises(AssertionError, match="read early"): knn(*TRAIN, TEST[0], late)
    assert linear_probe(*TRAIN, TEST[0], late, solver=solver) == fit(*TRAIN, solver=solver).score(*TEST)


def test_E12_the_choice_is_the_best_on_validation_not_on_test():
    "Test rows for which another lambda would have won."
    h, y = clouds(15, d=40, spread=3.0)
    t, u = clouds(200, d=40, spread=3.0, seed=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_test = {r: linear_probe(h, y, t, u, reg=r) for r in probes.REGS}
        chosen = [fit_linear_probe(h, y, seed=s) for s in range(8)]
    assert all(p.reg == max(p.validation, key=p.validation.get) for p in chosen)
    assert any(p.reg != max(on_test, key=on_test.get) for p in chosen)
    assert all(p.score(t, u) == on_test[p.reg] or abs(p.score(t, u) - on_test[p.reg]) < 2e-3 for p in chosen)


def by_hand(losses):
    "A probe of two classes and rows of class 0 whose losses are known: ln(1 + e^x)."
    one = torch.ones(1, dtype=torch.float64)
    p = Probe(torch.tensor([0, 1]), torch.tensor([[0.0], [1.0]]).double(), torch.zeros(2).double(), 0 * one, one, 0.0, {}, None, 0.0)
    return p, torch.tensor([[math.log(math.expm1(l))] for l in losses], dtype=torch.float64), torch.zeros(len(losses), dtype=torch.int64)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 100])
def test_E13_the_loss_is_the_mean_over_rows_not_over_batches(chunk):
    "A batch of 3 with mean 1 and a batch of 1 with loss 5: 2."
    p, h, y = by_hand([1.0, 1.0, 1.0, 5.0])
    assert p.loss(h, y, chunk) == pytest.approx(2.0, abs=1e-12)
    assert p.loss(torch.zeros(4, 1), y, chunk) == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("solver", ["lbfgs", "adam"])
def test_E14_warns_when_the_loss_is_not_below_a_blind_guess(solver):
    "Features that say nothing: all equal."
    h, y = torch.zeros(20, 3), torch.arange(2).repeat(10)
    with pytest.warns(UserWarning, match="is not below ln C = 0.6931"): assert fit_linear_probe(h, y, solver=solver).train_loss == pytest.approx(math.log(2))


def test_E14_warns_when_the_solver_did_not_converge():
    with pytest.warns(UserWarning, match="not converged after 2 steps"): assert fit_linear_probe(*TRAIN, max_iter=2).converged is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_linear_probe(*TRAIN).converged is True
        assert fit_linear_probe(*TRAIN, solver="adam").converged is None


def test_E14_warns_when_the_choice_did_not_converge():
    "The chosen lambda converges, a weaker one that it was compared with did not: the choice may be wrong."
    with pytest.warns(UserWarning, match="not converged after 10 steps"): probe = fit_linear_probe(*TRAIN, max_iter=10)
    assert probe.converged is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit_linear_probe(*TRAIN, reg=probe.reg, max_iter=10).converged is True
    with pytest.raises(ValueError, match="reg = inf: must be a finite number"): fit_linear_probe(*TRAIN, reg=math.inf)


def test_nearest_centre_agrees_with_scikit_learn():
    other = NearestCentroid().fit(*(t.numpy() for t in TRAIN))
    assert nearest_centre(class_centres(*TRAIN), TEST[0]).tolist() == other.predict(TEST[0].numpy()).tolist()
    assert nccc(*TRAIN, *TEST) == pytest.approx(other.score(*(t.numpy() for t in TEST)))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_knn_agrees_with_scikit_learn(k):
    "Two classes and an odd k: no tied votes."
    (h, y), (t, u) = TRAIN, TEST
    other = KNeighborsClassifier(k, metric="cosine").fit(h.numpy(), (y % 2).numpy())
    assert knn(h, y % 2, t, u % 2, k) == pytest.approx(other.score(t.numpy(), (u % 2).numpy()))


@pytest.mark.parametrize("k", [1, 4, 39])
def test_leave_one_out_is_a_bank_without_the_row(k):
    h, y = clouds(10)
    keep = lambda i: torch.arange(len(y)) != i
    want = sum(knn(h[keep(i)], y[keep(i)], h[i:i + 1], y[i:i + 1], k) for i in range(len(y))) / len(y)
    assert knn_loo(h, y, k) == pytest.approx(want)
    with pytest.raises(ValueError, match="k = 40: must be a whole number, at least 1 and at most 39"): knn_loo(h, y, 40)


def test_knn_does_not_depend_on_chunks():
    h, y = clouds(200, spread=3.0)
    bank = probes.unit_rows(h, "h")
    cut = [torch.cat([near for near, _ in probes._neighbours(bank, bank, 5, True, chunk)]) for chunk in (64, 512, 800)]
    assert (cut[0] == cut[1]).all() and (cut[0] == cut[2]).all()
    assert not (cut[0] == torch.arange(800)[:, None]).any()


def test_tied_neighbours_and_votes_follow_the_stated_rule():
    q = torch.tensor([[1.0, 0.0]])
    assert knn(torch.ones(3, 2), torch.tensor([8, 3, 3]), q, torch.tensor([8]), 1) == 1.0              # equally near: the earlier row
    assert knn(torch.tensor([[1.0, 1.0], [1.0, 0.1]]), torch.tensor([3, 8]), q, torch.tensor([8]), 2) == 1.0  # one vote each: the nearer
    assert knn(torch.ones(2, 2), torch.tensor([8, 3]), q, torch.tensor([3]), 2) == 1.0                 # alike in everything: the smaller


@pytest.mark.parametrize("C, reg", [(2, 0.1), (2, 1e-3), (4, 0.1), (4, 1e-3)])
def test_the_linear_probe_solves_the_stated_problem(C, reg):
    "The gradient of the written objective vanishes, with lambda meaning the same for two classes as for more."
    h, y = clouds(30, C=C)
    p = fit_linear_probe(h.double(), y, reg=reg)
    x = (h.double() - p.mean) / p.scale
    W, b = p.W.clone().requires_grad_(), p.b.clone().requires_grad_()
    (torch.nn.functional.cross_entropy(x @ W.T + b, y) + reg / 2 * W.square().sum()).backward()
    assert W.grad.abs().max() < 2e-5 and b.grad.abs().max() < 2e-5
    assert x.mean(0).abs().max() < 1e-9 and (x.std(0, correction=0) - 1).abs().max() < 1e-9


def test_the_linear_probe_agrees_with_scikit_learn():
    (h, y), (t, u) = TRAIN, TEST
    p = fit_linear_probe(h, y, reg=0.01)
    x = lambda v: ((v.double() - p.mean) / p.scale).numpy()
    other = LogisticRegression(C=1 / (0.01 * len(h)), tol=1e-8, max_iter=1000).fit(x(h), y.numpy())
    assert np.abs(p.W.numpy() - other.coef_).max() < 1e-3
    assert p.predict(t).tolist() == other.predict(x(t)).tolist()


def test_the_linear_probe_is_deterministic_and_blind_to_scale_and_offset():
    (h, y), (t, u) = TRAIN, TEST
    p, q = fit_linear_probe(h, y, reg=0.01), fit_linear_probe(h.double() * 100 + 1e4, y, reg=0.01)
    assert torch.equal(p.W, fit_linear_probe(h, y, reg=0.01).W)
    assert (p.W - q.W).abs().max() < 1e-3 and torch.equal(p.predict(t), q.predict(t.double() * 100 + 1e4))
    state = torch.random.get_rng_state()
    fit_linear_probe(h, y, solver="adam"), fit_linear_probe(h, y)
    assert torch.equal(state, torch.random.get_rng_state())


def test_adam_is_the_written_recipe():
    "A bias-free layer of torch, 300 full-batch steps of Adam at 0.003, from the same first weights."
    h, y = TRAIN
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.weight.data = ((2 * torch.rand(4, 6, generator=generator(5, "probe"), dtype=torch.float64) - 1) / 6**0.5).float()
    adam = torch.optim.Adam(layer.parameters(), lr=3e-3)
    for _ in range(300):
        loss = torch.nn.functional.cross_entropy(layer(h), y)
        adam.zero_grad(); loss.backward(); adam.step()
    with torch.no_grad(): p = fit_linear_probe(h, y, solver="adam", seed=5)
    assert (p.W - layer.weight.detach()).abs().max() < 1e-5 and not p.b.any()


def test_offset_features_keep_their_classes():
    "Features around 1e4 in float32: what is left of their digits decides, not cancellation."
    (h, y), (t, u) = clouds(offset=1e4), clouds(seed=1, offset=1e4)
    assert nccc(h, y, t, u) == nccc((h - 1e4).double(), y, (t - 1e4).double(), u)
    c = class_centres(h, y)
    assert (c.mu - class_centres(h - 1e4, y).mu).abs().max() < 1e-10


@pytest.mark.parametrize("call", [nccc, linear_probe, knn, lambda *a: nccc_few_shot(*a, n_shot=2)], ids=["nccc", "linear", "knn", "few-shot"])
def test_disjoint_classes_and_bad_rows_are_refused(call):
    (h, y), (t, u) = TRAIN, TEST
    with pytest.raises(ValueError, match=r"classes \[4, 5, 6, 7\] have no training rows"): call(h, y, t, u + 4)
    with pytest.raises(ValueError, match=r"classes \[9\] have no training rows"): call(h, y, t, torch.where(u == 3, 9, u))
    bad = t.clone(); bad[7, 2] = float("nan"); bad[9, 1] = float("inf")
    with pytest.raises(ValueError, match=r"row 7 holds NaN or inf \(2 such rows\)"): call(h, y, bad, u)
    with pytest.raises(ValueError, match="row 7 holds NaN"): call(bad, u, h, y)
    with pytest.raises(ValueError, match=r"labels must be whole numbers \[160\]"): call(h, y[:-1], t, u)
    with pytest.raises(ValueError, match="labels must be whole numbers"): call(h, y.float(), t, u)
    with pytest.raises(ValueError, match="features must be floats"): call(h[:, 0], y, t, u)


def test_other_refusals():
    h, y = TRAIN
    with pytest.raises(ValueError, match="row 0 is zero and has no direction"): knn_loo(0 * h, y, 1)
    with pytest.raises(ValueError, match="needs two classes, not 1"): fit_linear_probe(h, 0 * y)
    with pytest.raises(ValueError, match="have one training row"): fit_linear_probe(h[:4], y[:4])
    with pytest.raises(ValueError, match="reg = -1"): fit_linear_probe(h, y, reg=-1)
    with pytest.raises(ValueError, match="takes none"): fit_linear_probe(h, y, reg=1.0, solver="adam")
    with pytest.raises(ValueError, match="repeats = 0"): nccc_few_shot(*TRAIN, *TEST, 2, repeats=0)
    with pytest.raises(ValueError, match="must both be"): confusion(y, y[:3], 4)


def test_numpy_and_half_precision_are_welcome():
    a = [t.numpy() for t in (*TRAIN, *TEST)]
    for call in (nccc, linear_probe, lambda *x: knn(*x, k=3)):
        assert call(*a) == call(*TRAIN, *TEST)
        assert abs(call(TRAIN[0].half(), TRAIN[1].int(), TEST[0].half(), TEST[1]) - call(*TRAIN, *TEST)) < 0.03


def test_confusion_agrees_with_scikit_learn():
    guess = nearest_centre(class_centres(*TRAIN), TEST[0])
    assert confusion(TEST[1], guess, 5).tolist() == confusion_matrix(TEST[1], guess, labels=range(5)).tolist()
