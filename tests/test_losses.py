"""Losses against slow references, limits and invariances, published values, other libraries, and known faults of the field."""
import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from cl_nscl import losses as L
from cl_nscl.core import UserError, generator

torch.set_num_threads(1)
CONTRASTIVE = {"cl": L.cl_loss, "ntxent": L.ntxent_loss, "nscl": L.nscl_loss, "scl": L.scl_loss}
LABELS = {"unbalanced": [0, 0, 0, 0, 1, 2], "singletons": [5, 5, 1, 2, 3, 4], "balanced": [0, 1, 2, 0, 1, 2], "distinct": [9, 4, 7, 1, 0, 3]}


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed, "test losses", *shape), dtype=dtype)


def reference(name, z, y, tau, pairs="cross"):
    "Each anchor's loss, term by term as the papers write it; NaN where it is not defined."
    K, B, _ = z.shape
    y = y.tolist()
    u = (z / z.norm(dim=-1, keepdim=True)).tolist()
    e = lambda a, b: math.exp(sum(p * q for p, q in zip(u[a[0]][a[1]], u[b[0]][b[1]])) / tau)
    everything = list(itertools.product(range(K), range(B)))
    values = []
    for a in everything:
        l1, i = a
        others = [(l2, i) for l2 in range(K) if l2 != l1 or pairs == "all"]
        positives = [b for b in everything if b != a and y[b[1]] == y[i]] if name == "scl" else others
        keep = {"cl": lambda b: b[1] != i, "nscl": lambda b: y[b[1]] != y[i], "ntxent": lambda b: b != a, "scl": lambda b: b != a}[name]
        denominator = sum(e(a, b) for b in everything if keep(b))
        values.append(sum(-math.log(e(a, p) / denominator) for p in positives) / len(positives) if positives else math.nan)
    return torch.tensor(values, dtype=torch.float64)


def call(name, z, y, tau=0.5, pairs="cross", **kw):
    if name in ("cl", "nscl"): kw["pairs"] = pairs
    return CONTRASTIVE[name](z, y, tau, **kw)


def gradient(f, z):
    z = z.detach().clone().requires_grad_()
    f(z).backward()
    return z.grad


# -- against the slow references -----------------------------------------------------------------

DEFINED = [(name, K, labels) for name in CONTRASTIVE for K in (1, 2, 3) for labels in LABELS if K > 1 or (name == "scl" and labels != "distinct")]


@pytest.mark.parametrize("name, K, labels", DEFINED)
def test_every_objective_equals_its_term_by_term_reference(name, K, labels):
    y = torch.tensor(LABELS[labels])
    for tau, pairs, chunk in itertools.product([0.07, 0.5, 2.0], ["cross", "all"] if name in ("cl", "nscl") else ["cross"], [None, 0, 4]):
        z = draw(K, len(y), 5, seed=K)
        right = reference(name, z, y, tau, pairs)
        torch.testing.assert_close(call(name, z, y, tau, pairs, reduction="none", chunk=chunk), right, rtol=0, atol=1e-10, equal_nan=True)
        torch.testing.assert_close(call(name, z, y, tau, pairs, chunk=chunk), right.nanmean(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("B", [2, 3, 9])
def test_other_batch_sizes(B):
    y = torch.arange(B) % 2
    for name in CONTRASTIVE: torch.testing.assert_close(call(name, draw(2, B, 4), y), reference(name, draw(2, B, 4), y, 0.5).mean(), rtol=0, atol=1e-10)


def test_anchors_are_view_major():
    z, y = draw(3, 4, 5), torch.tensor([0, 0, 1, 2])
    for name in CONTRASTIVE:
        value = call(name, z, y, reduction="none").view(3, 4)
        torch.testing.assert_close(value[2, 1], reference(name, z, y, 0.5)[2*4 + 1])


def test_all_labels_distinct_nscl_is_cl_and_scl_is_ntxent():
    y = torch.tensor(LABELS["distinct"])
    for K, tau, pairs in itertools.product([2, 4], [0.05, 0.5], ["cross", "all"]):
        z = draw(K, 6, 8, seed=K)
        torch.testing.assert_close(L.nscl_loss(z, y, tau, pairs=pairs), L.cl_loss(z, y, tau, pairs=pairs), rtol=0, atol=1e-12)
        torch.testing.assert_close(L.scl_loss(z, y, tau), L.ntxent_loss(z, y, tau), rtol=0, atol=1e-12)


def test_the_value_of_all_pairs_from_that_of_cross_pairs():
    "The K^2 average adds the constant -1/tau with weight 1/K and shrinks the pull to (K - 1)/K."
    z, y = draw(3, 6, 8), torch.tensor(LABELS["balanced"])
    for name in ("cl", "nscl"):
        cross, both = (call(name, z, y, 0.3, p, reduction="none") for p in ("cross", "all"))
        pull = L._view_pull(L._units(z, 0.3), 0.3, "cross")
        torch.testing.assert_close(both, cross + pull / 3 - 1 / (3 * 0.3))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 4), st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda y: len(set(y)) > 1),
       st.sampled_from([0.02, 0.1, 0.5, 1.0, 3.0]), st.integers(1, 6))
def test_the_gap_of_cl_and_nscl_is_bounded(seed, K, labels, tau, d):
    y = torch.tensor(labels)
    z = draw(K, len(y), d, seed=seed)
    n = y.bincount().max().item()
    for pairs in ("cross", "all"):
        gap = (L.cl_loss(z, y, tau, pairs=pairs) - L.nscl_loss(z, y, tau, pairs=pairs)).item()
        assert -1e-9 <= gap <= math.log1p(n * math.exp(2 / tau) / (len(y) - n)) + 1e-9


# -- gradients, chunks, precision ------------------------------------------------------------------

@pytest.mark.parametrize("chunk", [None, 0, 1, 3])
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_gradcheck(name, chunk):
    z, y = draw(2, 4, 3).requires_grad_(), torch.tensor([0, 0, 1, 2])
    for reduction in ("mean", "none"):
        assert torch.autograd.gradcheck(lambda z: 3 * call(name, z, y, 0.3, reduction=reduction, chunk=chunk), z)


def test_gradcheck_of_masked_anchors():
    z, y = draw(1, 5, 3).requires_grad_(), torch.tensor([0, 1, 1, 3, 1])
    for chunk in (None, 0, 2): assert torch.autograd.gradcheck(lambda z: L.scl_loss(z, y, 0.3, chunk=chunk), z)
    right = gradient(lambda z: L.scl_loss(z, y, 0.3, chunk=0), z)
    torch.testing.assert_close(gradient(lambda z: L.scl_loss(z, y, 0.3, reduction="none").nanmean(), z), right)


def test_second_derivatives_need_the_whole_matrix():
    z, y = draw(2, 3, 3).requires_grad_(), torch.tensor([0, 0, 1])
    assert torch.autograd.gradgradcheck(lambda z: L.nscl_loss(z, y, 0.5, chunk=0), z)
    for reduction in ("mean", "none"):
        with pytest.raises(RuntimeError, match="pass chunk=0"): torch.autograd.grad(L.nscl_loss(z, y, reduction=reduction).mean(), z, create_graph=True)
    hessian = torch.func.hessian(lambda z: L.cl_loss(z, chunk=0))(z.detach())
    torch.testing.assert_close(hessian, torch.autograd.functional.hessian(lambda z: L.cl_loss(z, chunk=0), z.detach()))


def test_twice_backward_and_two_losses_on_one_input():
    z, y = draw(2, 6, 4).requires_grad_(), torch.tensor(LABELS["balanced"])
    loss = L.cl_loss(z)
    one, = torch.autograd.grad(loss, z, retain_graph=True)
    two, = torch.autograd.grad(loss, z)
    assert torch.equal(one, two)
    both = gradient(lambda z: L.cl_loss(z) + 2 * L.nscl_loss(z, y), z)
    torch.testing.assert_close(both, one + 2 * gradient(lambda z: L.nscl_loss(z, y), z))


@pytest.mark.parametrize("dtype, eps", [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_chunked_equals_plain(name, dtype, eps):
    z, y = draw(2, 60, 16, dtype=dtype), torch.arange(60) % 7
    for tau in (0.1, 0.5):
        plain, slope = call(name, z, y, tau, chunk=0), gradient(lambda z: call(name, z, y, tau, chunk=0), z)
        for chunk in (None, 1, 7, 50, 119, 120, 500):
            torch.testing.assert_close(call(name, z, y, tau, chunk=chunk), plain, rtol=eps, atol=eps)
            torch.testing.assert_close(gradient(lambda z: call(name, z, y, tau, chunk=chunk), z), slope, rtol=0, atol=eps)
            torch.testing.assert_close(gradient(lambda z: call(name, z, y, tau, chunk=chunk, reduction="none").mean(), z), slope, rtol=0, atol=eps)


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_float32_stays_near_float64(name):
    z, y = draw(2, 500, 32), torch.arange(500) % 10
    for tau in (0.05, 0.5):
        assert abs(call(name, z.float(), y, tau).item() - call(name, z, y, tau).item()) < 2e-6 / tau
        torch.testing.assert_close(gradient(lambda z: call(name, z, y, tau), z.float()).double(), gradient(lambda z: call(name, z, y, tau), z), rtol=0, atol=1e-7)


def test_output_types():
    y = torch.tensor(LABELS["balanced"])
    for name in CONTRASTIVE:
        for dtype, out in [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)]:
            z = draw(2, 6, 4).to(dtype)
            assert call(name, z, y).dtype == out and gradient(lambda z: call(name, z, y), z).dtype == dtype


def test_no_grad_and_input_that_needs_no_gradient():
    z = draw(2, 6, 4)
    with torch.no_grad(): assert L.cl_loss(z.clone().requires_grad_()) == L.cl_loss(z)
    assert not L.cl_loss(z).requires_grad and L.cl_loss(z.clone().requires_grad_()).requires_grad


def test_inputs_are_left_as_they_were():
    z, y = draw(2, 6, 4), torch.tensor(LABELS["balanced"])
    for name in CONTRASTIVE:
        before, state = z.clone(), torch.get_rng_state()
        gradient(lambda v: call(name, z * v.sum(), y), torch.ones(1, dtype=torch.float64))
        assert torch.equal(z, before) and torch.equal(state, torch.get_rng_state())


def test_rotation_leaves_the_losses_alone():
    z, y = draw(2, 6, 4), torch.tensor(LABELS["balanced"])
    Q = torch.linalg.qr(draw(4, 4))[0]
    for name in CONTRASTIVE: torch.testing.assert_close(call(name, z @ Q, y), call(name, z, y))


# -- known faults ------------------------------------------------------------------------------------

def test_L01_anchor_without_positive_is_left_out():
    "Neither 0/0 = NaN, nor a zero that dilutes the mean."
    y = torch.tensor([0, 1, 1, 3])
    for tau, chunk in itertools.product([0.07, 0.5, 1.0], [None, 0, 3]):
        assert L.scl_loss(torch.eye(4)[None], y, tau, chunk=chunk).item() == pytest.approx(math.log(3), abs=1e-6)
    each = L.scl_loss(torch.eye(4)[None], y, reduction="none")
    assert each.isnan().tolist() == [True, False, False, True] and torch.equal(each.nanmean(), L.scl_loss(torch.eye(4)[None], y))
    assert gradient(lambda z: L.scl_loss(z, y), draw(1, 4, 4)).isfinite().all()


def test_L02_no_positive_or_no_negative_anywhere_is_an_error():
    "Not a silent 0."
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match="SCL has no positives"): L.scl_loss(draw(1, 4, 4), torch.arange(4), reduction=reduction)
        with pytest.raises(ValueError, match="NSCL has no negatives: class 3 fills the whole batch of 4 images"):
            L.nscl_loss(draw(2, 4, 4), torch.full((4,), 3), reduction=reduction)
    assert L.scl_loss(draw(2, 4, 4), torch.full((4,), 3)).isfinite()             # one class: SCL is defined


@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0])
def test_L04_what_the_denominator_holds(tau):
    "All projections identical, B = 4: ln 7 and ln 6; a positive counted twice gives ln 8."
    z = draw(5).expand(2, 4, 5)
    assert L.ntxent_loss(z, tau=tau).item() == pytest.approx(1.945910, abs=1e-6)
    assert L.cl_loss(z, tau=tau).item() == pytest.approx(1.791759, abs=1e-6)


def test_L07_the_gap_of_cl_and_nscl():
    y = torch.arange(12) % 4
    for tau, seed in itertools.product([0.1, 0.5, 1.0], range(20)):
        z = draw(2, 12, 16, seed=seed)
        gap = (L.cl_loss(z, y, tau) - L.nscl_loss(z, y, tau)).item()
        assert 0 <= gap <= math.log(1 + 4 / 18 * math.exp(2 / tau))              # 4 other views of the class, 18 of other classes
        assert (L.cl_loss(z, None, tau) - L.nscl_loss(z, torch.arange(12), tau)).item() == pytest.approx(0, abs=1e-12)


def test_L08_anchors_weigh_the_same_whatever_their_class():
    value = L.nscl_loss(torch.ones(2, 3, 4), torch.tensor([0, 0, 1]))
    assert value.item() == pytest.approx(0.924196, abs=1e-6)


def test_L09_no_hidden_factor_and_a_known_value_at_collapse():
    for tau in (0.07, 1.0): assert L.scl_loss(torch.ones(2, 2, 4), torch.tensor([0, 0]), tau).item() == pytest.approx(1.098612, abs=1e-6)
    assert L.collapse_value("scl", torch.tensor([0, 0])) == pytest.approx(math.log(3), abs=1e-12)
    y = torch.tensor(LABELS["unbalanced"])
    for name, K in itertools.product(CONTRASTIVE, [2, 3]):
        for tau in (0.07, 1.0): assert call(name, draw(5).expand(K, 6, 5), y, tau).item() == pytest.approx(L.collapse_value(name, y, K), abs=1e-10)
    assert math.isnan(L.collapse_value("ce", y))


def test_L10_cross_view_pairs_or_the_literal_average():
    z = torch.stack([torch.eye(2), torch.eye(2).flip(0)])
    assert L.cl_loss(z, tau=1).item() == pytest.approx(1.313262, abs=1e-6)
    assert L.cl_loss(z, tau=1, pairs="all").item() == pytest.approx(0.813262, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CONTRASTIVE)
def test_L12_half_precision_is_computed_in_float32(name, dtype):
    y = torch.tensor([0, 0, 1, 2])
    for tau, chunk, reduction in itertools.product([0.05, 0.01], [None, 0, 3], ["mean", "none"]):
        half = draw(2, 4, 16).to(dtype)
        right = call(name, half.float(), y, tau, reduction=reduction)
        f = lambda z: call(name, z, y, tau, chunk=chunk, reduction=reduction)
        torch.testing.assert_close(f(half), right, rtol=0, atol=1e-4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(f(half), right, rtol=0, atol=1e-4)
            slope = gradient(lambda z: f(z).mean(), half.float())                 # autocast around backward() reaches only plain autograd (chunk=0)
        if chunk != 0: torch.testing.assert_close(slope, gradient(lambda z: call(name, z, y, tau), half.float()), rtol=1e-4, atol=1e-4)
        assert gradient(lambda z: f(z).mean(), half).isfinite().all()


def test_L14_projections_of_any_length():
    z, y = draw(2, 6, 8, dtype=torch.float32), torch.tensor(LABELS["balanced"])
    for name, (a, b) in itertools.product(CONTRASTIVE, [(3, 0.5), (1e30, 1e-30), (1e-35, 1e35)]):
        assert call(name, torch.stack([a * z[0], b * z[1]]), y).item() == pytest.approx(call(name, z, y).item(), abs=1e-6)


@pytest.mark.parametrize("name", list(L.OBJECTIVES))
def test_L12_a_temperature_that_overflows_is_refused(name):
    "1 / 1e-39 is infinite in float32: the loss would be NaN. The smallest that is allowed is fine."
    z, y = draw(2, 6, 4, dtype=torch.float32).requires_grad_(), torch.arange(6) % 3
    if name == "ce": return
    with pytest.raises(ValueError, match="tau must be at least 1e-30, not 1e-39"): L.OBJECTIVES[name].fn(z, y, 1e-39, "cross")
    loss = L.OBJECTIVES[name].fn(z, y, 1e-30, "cross")
    loss.backward()
    assert loss.isfinite() and z.grad.isfinite().all()


@pytest.mark.parametrize("make", [L.CLLoss, L.NSCLLoss, L.SCLLoss, L.NTXentLoss])
def test_L15_a_loss_object_refuses_at_once_what_it_cannot_work_with(make):
    with pytest.raises(ValueError, match="tau must be a finite number > 0, not 0"): make(tau=0)
    with pytest.raises(ValueError, match="tensors of one shape"): make()([1], [2])
    if make in (L.CLLoss, L.NSCLLoss):
        with pytest.raises(ValueError, match="pairs must be"): make(pairs="every")


def test_L15_one_object_serves_batches_of_any_size():
    for criterion in (L.CLLoss(0.1), L.NTXentLoss(0.1), L.NSCLLoss(0.1), L.SCLLoss(0.1)):
        for B in (256, 100, 3):
            z, y = draw(2, B, 8), torch.arange(B) % 2
            assert torch.equal(criterion(*z, y), type(criterion)(0.1)(*z, y))
        assert not list(criterion.buffers()) and not criterion.state_dict()
        assert torch.equal(pickle.loads(pickle.dumps(criterion))(*z, y), criterion(*z, y))


def test_L16_a_batch_of_one_image_is_refused():
    "Not a plain 0 on which backward() fails."
    for name in CONTRASTIVE:
        with pytest.raises(ValueError, match="B must be at least 2"): call(name, draw(2, 1, 4), torch.tensor([0]))
    assert L.ce_loss(draw(2, 1, 4), torch.tensor([0])).isfinite()


@pytest.mark.parametrize("f", [L.nscl_loss, L.scl_loss, L.ce_loss])
def test_L17_shapes_and_types_of_labels(f):
    z, y = draw(2, 4, 8), torch.tensor([0, 1, 1, 2])
    column = torch.stack([y, y * 7], 1)[:, 0]
    assert not column.is_contiguous()
    for same in (y, y.int(), y.float(), y.to(torch.uint8), y[:, None], column): assert torch.equal(f(z, same), f(z, y))
    for bad in (y.repeat(2), y[:, None, None].expand(4, 4, 4), y[:3], y[None], y + 0.5, y / 0, y.to(torch.complex64), y.tolist(), None):
        with pytest.raises(ValueError, match="y must"): f(z, bad)


def test_L19_order_of_the_batch_and_of_the_views():
    z, y = draw(2, 12, 8), torch.arange(12) % 5
    for name, seed in itertools.product(CONTRASTIVE, range(5)):
        perm = torch.randperm(12, generator=generator(seed, "perm"))
        assert call(name, z[:, perm], y[perm]).item() == pytest.approx(call(name, z, y).item(), abs=1e-12)
        assert call(name, z.flip(0), y).item() == pytest.approx(call(name, z, y).item(), abs=1e-12)
        each = call(name, z, y, reduction="none").view(2, 12)
        torch.testing.assert_close(call(name, z[:, perm], y[perm], reduction="none").view(2, 12), each[:, perm])
        torch.testing.assert_close(call(name, z.flip(0), y, reduction="none").view(2, 12), each.flip(0))


MEMORY = """
import sys, torch
from cl_nscl import losses as L
torch.set_num_threads(1)
name, reduction, B = sys.argv[1], sys.argv[2], int(sys.argv[3])
kb = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
def step(B):
    z, y = torch.randn(2, B, 128).requires_grad_(), torch.arange(B) % 10
    return lambda: getattr(L, name)(z, y, reduction=reduction).mean().backward()
step(8)()
f = step(B)
open("/proc/self/clear_refs", "w").write("5")
before = kb("VmRSS")
f()
print((kb("VmHWM") - before) / 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("name, reduction, B, limit", [("cl_loss", "mean", 1024, 134), ("nscl_loss", "none", 1024, 134), ("scl_loss", "mean", 4096, 150)])
def test_L20_peak_memory(name, reduction, B, limit):
    "In MB. One whole matrix of 8,192 rows would be 268, a broadcast over the features 34 GB."
    out = subprocess.run([sys.executable, "-c", MEMORY, name, reduction, str(B)], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if "clear_refs" in out.stderr: pytest.skip("the peak cannot be reset here")
    assert out.returncode == 0, out.stderr
    assert float(out.stdout) < limit


def test_L22_the_mean_is_the_mean():
    z, y = draw(2, 3, 8, dtype=torch.float32), torch.tensor([0, 0, 1])
    for name in CONTRASTIVE:
        each = call(name, z, y, reduction="none")
        assert each.shape == (6,) and torch.equal(each.mean(), call(name, z, y))
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'none'"): call(name, z, y, reduction="sum")


# -- refusals ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CONTRASTIVE)
def test_what_is_refused(name):
    z, y = draw(2, 6, 4), torch.tensor(LABELS["balanced"])
    for tau in (0, -0.5, math.inf, math.nan, None, "0.5", True, torch.tensor(0.5)):
        with pytest.raises(ValueError, match="tau must be a finite number > 0"): call(name, z, y, tau)
    for bad in (z[0], z.long(), z[..., None], z[..., :0], z[:, :0], z.numpy(), None):
        with pytest.raises(ValueError, match=r"\[K, B, d\], views first"): call(name, bad, y)
    if name != "scl":
        with pytest.raises(ValueError, match="K = 1 view"): call(name, z[:1], y)
    for chunk in (-1, 2.5, True):
        with pytest.raises(ValueError, match="chunk must be"): call(name, z, y, chunk=chunk)
    for value, says in [(0, "all zeros"), (math.nan, "not finite"), (math.inf, "not finite")]:
        hole = z.clone(); hole[1, 4] = value
        with pytest.raises(ValueError, match=rf"z\[1, 4\] \(view 1, image 4\) is {says}.*; 1 such row"): call(name, hole, y)
    if name in ("cl", "nscl"):
        with pytest.raises(ValueError, match="pairs must be 'cross'"): call(name, z, y, pairs="both")


def test_what_ce_refuses():
    z, y = draw(2, 4, 3), torch.tensor([0, 1, 1, 2])
    with pytest.raises(ValueError, match=r"y must lie in 0 \.\. 2, not in 1 \.\. 3"): L.ce_loss(z, y + 1)
    with pytest.raises(ValueError, match="logits are not finite"): L.ce_loss(z / 0, y)
    with pytest.raises(ValueError, match=r"\[K, B, C\]"): L.ce_loss(z[0], y)


def test_ce_is_the_average_over_views():
    z, y = draw(3, 6, 5), torch.tensor([0, 4, 1, 1, 2, 3])
    torch.testing.assert_close(L.ce_loss(z, y), sum(F.cross_entropy(v, y) for v in z) / 3)
    assert torch.autograd.gradcheck(lambda z: L.ce_loss(z, y), z.requires_grad_())
    half = z.detach().bfloat16()
    assert L.ce_loss(half, y).dtype == torch.float32 and torch.equal(L.ce_loss(half, y), L.ce_loss(half.float(), y))


# -- objectives by name ------------------------------------------------------------------------------

def test_objectives_have_one_call_signature():
    z, y = draw(2, 6, 8), torch.tensor(LABELS["balanced"])
    assert list(L.OBJECTIVES) == ["cl", "ntxent", "nscl", "scl", "ce"]
    for name, o in L.OBJECTIVES.items():
        for pairs in ("cross", "all"):
            right = L.ce_loss(z, y) if name == "ce" else call(name, z, y, 0.2, pairs)
            assert o.name == name and torch.equal(o.fn(z, y, 0.2, pairs), right) and right.ndim == 0
        if not o.needs_labels: assert torch.equal(o.fn(z, None, 0.2, "cross"), o.fn(z, y, 0.2, "cross"))


def test_a_name_belongs_to_the_file_that_registered_it(tmp_path):
    "The same file, edited, replaces its own objective; another file may not have the name; charts know it at once."
    from cl_nscl.core import import_plugins
    from cl_nscl.plots import COLOURS, styles, title
    text = "from cl_nscl.losses import Objective, register\nregister(Objective('mine', lambda z, y, tau, pairs: {} * z.square().mean(), False, False, 'My Loss'))\n"
    (one := tmp_path/"one.py").write_text(text.format(1)); (two := tmp_path/"two.py").write_text(text.format(2))
    try:
        import_plugins((str(one),)); one.write_text(text.format(3)); import_plugins((str(one),))
        assert L.OBJECTIVES["mine"].fn(torch.ones(2, 3, 4), None, 0.5, "cross") == 3
        with pytest.raises(UserError, match="'mine' exists already"): import_plugins((str(two),))
        assert title("cl-mine") == "CL to My Loss" and styles(["cl-mine"])["cl-mine"][0] not in COLOURS.values()
        assert styles(["mine"])["mine"] == styles(["a", "b", "cl-mine"])["cl-mine"]
    finally: L.OBJECTIVES.pop("mine", None)
    with pytest.raises(UserError, match="must be a Python name"): L.register(L.Objective("cl-mine", len, False, False, "two twins?"))
    with pytest.raises(UserError, match="fn must be a function"): L.register(L.Objective("mine", 3, False, False, "a number"))


def test_register_keeps_what_is_there():
    mine = L.Objective("mine", lambda z, y, tau, pairs: z.mean(), False, False, "Mine")
    before = dict(L.OBJECTIVES)
    try:
        assert L.register(mine) is mine and L.OBJECTIVES["mine"] is mine
        assert L.register(mine) is mine                                           # a cell that is run twice
    finally: L.OBJECTIVES.pop("mine", None)
    with pytest.raises(UserError, match="'cl' exists already"): L.register(L.Objective("cl", mine.fn, False, False, "Mine"))
    assert L.OBJECTIVES == before


def test_modules_refuse_views_of_different_shapes():
    with pytest.raises(ValueError, match="one shape"): L.CLLoss()(draw(6, 4), draw(5, 4))


# -- other libraries as oracles ----------------------------------------------------------------------

def test_lightly_agrees():
    lightly = pytest.importorskip("lightly.loss")
    z = draw(2, 16, 8)
    for tau in (0.1, 0.5):
        torch.testing.assert_close(L.ntxent_loss(z, tau=tau), lightly.NTXentLoss(temperature=tau)(*z))
        torch.testing.assert_close(L.cl_loss(z, tau=tau), lightly.DCLLoss(temperature=tau)(*z))


def test_pytorch_metric_learning_agrees():
    pml = pytest.importorskip("pytorch_metric_learning.losses")
    z, y = draw(2, 16, 8), torch.arange(16) % 5
    for tau in (0.1, 0.5):
        torch.testing.assert_close(L.scl_loss(z, y, tau), pml.SupConLoss(temperature=tau)(z.flatten(0, 1), y.repeat(2)))
        torch.testing.assert_close(L.ntxent_loss(z, tau=tau), pml.NTXentLoss(temperature=tau)(z.flatten(0, 1), torch.arange(16).repeat(2)))


# -- on an accelerator -------------------------------------------------------------------------------

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_step_never_waits_for_the_device():
    y = torch.arange(600) % 7
    for name, dtype in itertools.product(L.OBJECTIVES, [torch.float32, torch.float64]):
        z = draw(2, 600, 16, dtype=dtype)
        right, slope = L.OBJECTIVES[name].fn(z, y, 0.1, "cross"), gradient(lambda z: L.OBJECTIVES[name].fn(z, y, 0.1, "cross"), z)
        zc, yc = z.cuda().requires_grad_(), y.cuda()
        L.OBJECTIVES[name].fn(zc, yc, 0.1, "cross").backward(); zc.grad = None              # libraries load here
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss = L.OBJECTIVES[name].fn(zc, yc, 0.1, "cross")
            loss.backward()
        finally: torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(loss.cpu(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(zc.grad.cpu(), slope, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_is_undefined_is_nan():
    z, y = draw(2, 6, 4).cuda(), torch.zeros(6, dtype=torch.long, device="cuda")
    assert L.nscl_loss(z, y).isnan() and L.scl_loss(z[:1], torch.arange(6, device="cuda")).isnan()
    hole = z.clone(); hole[0, 2, 1] = math.nan
    for name in CONTRASTIVE: assert call(name, hole, torch.arange(6, device="cuda") % 3).isnan()
    hole[0, 2] = 0
    assert gradient(lambda z: L.cl_loss(z), hole).isfinite().all()
