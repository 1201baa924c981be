"Optimisation: LARS by hand, exact resume, a schedule that reaches its peak, clipping after unscaling."
import copy, math
from dataclasses import replace

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch import nn

from cl_nscl.core import Params, UserError, generator
from cl_nscl.models import build_twin
from cl_nscl.optim import LARS, OPTIMIZERS, build_optimizer, clip_gradients, decay_groups, peak_lr, schedule, step

torch.set_num_threads(1)
p8 = Params(encoder="resnet8", proj_hidden=32, proj_dim=16, weight_decay=0.1, optimizer="lars")

def param(w, g):
    w = nn.Parameter(torch.tensor(w)); w.grad = torch.tensor(g)
    return w

def net(seed=0):
    g = generator(seed, "net")
    return [nn.Parameter(torch.randn(s, generator=g)) for s in [(4, 3), (4,), (2, 4, 3, 3), (1,), ()]]

def fill(ws, t):
    g = generator(t, "grad")
    for w in ws: w.grad = torch.randn(w.shape, generator=g)


def test_O01_biases_and_norm_parameters_get_neither_ratio_nor_decay():
    w = param([2.0], [0.5])
    LARS([w], lr=0.1, weight_decay=0.1, momentum=0).step()
    assert w.item() == torch.tensor(1.95).item()
    scalar = param(2.0, 0.5)
    LARS([scalar], lr=0.1, weight_decay=0.1, momentum=0).step()
    assert scalar.item() == torch.tensor(1.95).item()

@pytest.mark.parametrize("name", ["sgd", "lars"])
def test_O01_the_selection_by_shape_holds_for_each_optimizer(name):
    m = build_twin(p8, channels=1, size=8, C=3)
    names, opt = {id(w): k for k, w in m.named_parameters()}, build_optimizer(replace(p8, optimizer=name), m)
    group = {names[id(w)]: g["weight_decay"] for g in opt.param_groups for w in g["params"]}
    assert set(group) == set(names.values())
    for k, w in m.named_parameters(): assert group[k] == (0.1 if w.ndim > 1 else 0.0), k
    assert group["encoder.bn1.weight"] == group["encoder.layer2.0.downsample.1.weight"] == group["head.bias"] == 0

def test_frozen_parameters_are_in_no_group():
    m = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    m[0].requires_grad_(False)
    assert [len(g["params"]) for g in decay_groups(m, 0.1)] == [2]


@pytest.mark.parametrize("w,g,after", [([[1.0, 2.0]], [[0.0, 0.0]], [[1.0, 2.0]]), ([[0.0, 0.0]], [[0.0, 0.0]], [[0.0, 0.0]]), ([[0.0, 0.0]], [[1.0, 0.0]], [[-0.5, 0.0]])])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_O03_zero_norms_are_safe(w, g, after, momentum):
    w = param(w, g)
    LARS([w], lr=0.5, momentum=momentum).step()
    assert torch.equal(w.detach(), torch.tensor(after))


def test_O04_decay_is_inside_the_gradient_before_the_ratio_and_from_the_group():
    w, v = (param([[3.0, 4.0]], [[0.0, 2.0]]) for _ in range(2))
    w.data, v.data, w.grad, v.grad = (t.double() for t in (w.data, v.data, w.grad, v.grad))
    opt = LARS([dict(params=[w], weight_decay=0.1), dict(params=[v])], lr=1.0, momentum=0, eta=0.001)
    opt.step()
    torch.testing.assert_close(w.detach(), torch.tensor([[2.99937983, 3.99503861]], dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(v.detach(), torch.tensor([[3, 3.995]], dtype=torch.float64), rtol=0, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 0.99), st.floats(0, 0.5), st.floats(1e-4, 1), st.integers(-1, 2))
def test_lars_equals_a_loop_over_layers(seed, m, wd, eta, exclude):
    ws = net(seed)
    ref, vs = [w.detach().clone() for w in ws], [torch.zeros_like(w) for w in ws]
    opt = LARS(ws, lr=0.3, momentum=m, weight_decay=wd, eta=eta, exclude=exclude)
    for t in range(3):
        fill(ws, seed + t)
        for i, w in enumerate(ws):
            d = w.grad.clone()
            if w.ndim > exclude:
                d = d + wd * ref[i]
                d = d * (eta * ref[i].norm() / d.norm())
            vs[i] = m * vs[i] + d
            ref[i] = ref[i] - 0.3 * vs[i]
        opt.step()
    for w, r in zip(ws, ref): torch.testing.assert_close(w.detach(), r, rtol=1e-4, atol=1e-5)


def test_the_step_is_unchanged_when_the_loss_is_rescaled():
    a, b = net(), net()
    oa, ob = (LARS(ws, lr=0.3, exclude=-1) for ws in (a, b))
    for t in range(3):
        fill(a, t); fill(b, t)
        for w in b: w.grad *= 64
        oa.step(); ob.step()
    for w, v in zip(a, b): torch.testing.assert_close(w, v, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_O06_resume_is_bit_exact_and_the_state_is_plain(name, tmp_path):
    m = build_twin(replace(p8, optimizer=name), channels=1, size=8)
    twin, p = copy.deepcopy(m), replace(p8, optimizer=name)
    def go(model, opt, steps):
        for t in steps:
            fill(list(model.parameters()), t)
            for g in opt.param_groups: g["lr"] = peak_lr(p) * schedule(t, 3, 2)
            opt.step()
        return opt
    go(m, build_optimizer(p, m), range(3))
    opt = go(twin, build_optimizer(p, twin), range(2))
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    state = torch.load(tmp_path / "opt.pt", weights_only=True)
    new = build_optimizer(p, twin); new.load_state_dict(state)
    go(twin, new, range(2, 3))
    for a, b in zip(m.parameters(), twin.parameters()): assert torch.equal(a, b)
    for g in new.param_groups: assert type(g["lr"]) is float
    leaves = [v for s in state["state"].values() for v in s.values()] + [v for g in state["param_groups"] for k, v in g.items() if k != "params"]
    assert all(v is None or isinstance(v, (torch.Tensor, int, float, bool)) for v in leaves)

def test_O06_a_copied_or_pickled_optimizer_still_excludes():
    w = param([2.0], [0.5])
    opt = copy.deepcopy(LARS([w], lr=0.1, weight_decay=0.1, momentum=0))
    v = opt.param_groups[0]["params"][0]
    v.grad = torch.tensor([0.5]); opt.step()
    assert v.item() == torch.tensor(1.95).item()


def test_O07_gradients_stay_and_closures_are_honoured():
    ws = net(); fill(ws, 0)
    before = [w.grad.clone() for w in ws]
    opt = LARS(ws, lr=0.1, weight_decay=0.1); opt.step(); opt.step()
    for w, g in zip(ws, before): assert torch.equal(w.grad, g)
    w = nn.Parameter(torch.tensor([[1.0, 1.0]])); opt = LARS([w], lr=0.1)
    def closure():
        opt.zero_grad(); loss = (w**2).sum(); loss.backward()
        return loss
    assert opt.step(closure).item() == 2.0 and w[0, 0] < 1
    for bad in (dict(lr=-1.0), dict(lr=math.nan), dict(lr=1.0, eta=-1.0), dict(lr=1.0, momentum=math.inf)):
        with pytest.raises(ValueError, match="must be a number >= 0"): LARS([w], **bad)

def test_parameters_without_a_gradient_are_left_alone():
    a, b = param([[1.0]], [[1.0]]), nn.Parameter(torch.tensor([[1.0]]))
    LARS([a, b], lr=0.1, weight_decay=0.5).step()
    assert b.item() == 1.0 and a.item() < 1.0


def test_O08_the_peak_is_reached_exactly_and_never_left_upwards():
    f = [schedule(t, 20, 10) for t in range(20)]
    assert max(f) == 1.0 and f.index(1.0) == 9
    assert all(a >= b for a, b in zip(f[9:], f[10:])) and all(a < b for a, b in zip(f[:9], f[1:10]))

@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 4000))
def test_O08_the_peak_is_reached_for_every_warmup(total, W):
    f = [schedule(t, total, W) for t in range(total)]
    peak = min(max(W, 1), total) - 1
    assert f[peak] == 1.0 and max(f) == 1.0 and min(f) > 0
    assert all(a >= b for a, b in zip(f[peak:], f[peak + 1:])) and schedule(total, total, W) == (0 if W < total else schedule(total, total, W))

def test_O10_the_first_step_is_not_wasted():
    assert schedule(0, 100, 10) == 0.1 and schedule(0, 100, 0) == 1.0
    for bad in (-1, 101):
        with pytest.raises(ValueError, match="must be in 0"): schedule(bad, 100, 10)


def test_peak_follows_the_rule():
    for rule, a in dict(linear=1, sqrt=0.5, fourth=0.25, constant=0).items():
        assert peak_lr(Params(lr=0.3, B=1024, B_ref=256, lr_rule=rule)) == pytest.approx(0.3 * 4**a)
        assert peak_lr(Params(lr=0.3, B=256, B_ref=256, lr_rule=rule)) == 0.3
    with pytest.raises(UserError, match="unknown optimizer 'adma'"): build_optimizer(Params(optimizer="adma"), nn.Linear(2, 2))


def scaled_run(bad_step, n=5):
    "Two steps of the same model under a loss scaler; the gradient of `bad_step` is infinite."
    w = nn.Parameter(torch.tensor([[1.0, -1.0]]))
    opt, scaler, trace = LARS([w], lr=1.0), torch.amp.GradScaler("cpu", init_scale=2.0**16), []
    for t in range(n):
        for g in opt.param_groups: g["lr"] = 0.5 * schedule(t, n, 2)
        opt.zero_grad()
        scaler.scale((w * torch.tensor([[0.3, math.inf if t == bad_step else 0.4]])).sum()).backward()
        before = w.detach().clone()
        norm, skipped = step(opt, [w], 1.0, scaler)
        trace.append((opt.param_groups[0]["lr"], skipped, torch.equal(before, w.detach()), norm.item()))
    return w, trace

def test_O12_an_overflow_is_skipped_and_said_and_the_twins_keep_one_learning_rate():
    w, overflowed = scaled_run(3)
    v, smooth = scaled_run(-1)
    assert [t[1] for t in overflowed] == [False, False, False, True, False] and not any(t[1] for t in smooth)
    assert [t[2] for t in overflowed] == [t[1] for t in overflowed]              # weights unchanged exactly where skipped
    assert [t[0] for t in overflowed] == [t[0] for t in smooth]
    assert w.isfinite().all() and not math.isfinite(overflowed[3][3])

def test_O12_a_scaler_that_is_off_never_skips():
    w = param([[1.0]], [[0.5]])
    norm, skipped = step(torch.optim.SGD([w], lr=1.0), [w], 0.0, torch.amp.GradScaler("cpu", enabled=False))
    assert not skipped and w.item() == 0.5 and norm.item() == 0.5


def test_O13_clipping_sees_unscaled_gradients():
    w = nn.Parameter(torch.tensor([1.0, 1.0]))
    opt, scaler = torch.optim.SGD([w], lr=1.0), torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale((w * torch.tensor([0.3, 0.4])).sum()).backward()
    assert w.grad.norm().item() == 32768
    norm, _ = step(opt, [w], 1.0, scaler)
    assert norm.item() == pytest.approx(0.5) and w.grad.norm().item() == pytest.approx(0.5)
    torch.testing.assert_close(w.detach(), torch.tensor([0.7, 0.6]))


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_O13_no_gradient_has_norm_zero(max_norm):
    assert clip_gradients([nn.Parameter(torch.ones(2))], max_norm).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_O04_norms_of_half_precision_weights_do_not_overflow(dtype):
    "The norm of 300 x ones(400, 400) is 120,000, more than float16 holds."
    w, v = (nn.Parameter(torch.full((400, 400), 300.0, dtype=t)) for t in (dtype, torch.float32))
    for p in (w, v):
        p.grad = torch.ones_like(p)
        LARS([p], lr=1.0, momentum=0, eta=0.01).step()
    assert torch.allclose(w.float(), v, rtol=torch.finfo(dtype).eps) and abs(v[0, 0] - 297) < 0.01


@pytest.mark.parametrize("max_norm,after", [(1.0, 1.0), (0.0, 13.0), (20.0, 13.0)])
def test_the_norm_returned_is_the_one_before_clipping(max_norm, after):
    a, b, c = param([0.0, 0.0], [3.0, 4.0]), param([0.0], [12.0]), nn.Parameter(torch.zeros(2))
    assert clip_gradients(iter([a, b, c]), max_norm).item() == pytest.approx(13)
    assert math.hypot(*a.grad.tolist(), *b.grad.tolist()) == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_few_steps_lower_a_loss(name):
    p = replace(p8, optimizer=name, weight_decay=1e-6, lr=5.0 if name == "lars" else 0.1)
    m = build_twin(p, channels=1, size=8, C=2)
    x = torch.rand(32, 1, 8, 8, generator=generator(0, "x")); y = (x.mean((1, 2, 3)) > x.mean()).long()
    opt, losses = build_optimizer(p, m), []
    for t in range(25):
        loss = nn.functional.cross_entropy(m.logits(m(x)[1]), y); opt.zero_grad(); loss.backward()
        step(opt, m.parameters(), 1.0); losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
