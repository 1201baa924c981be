"""Speed that changes no result: precision, gradient caching, determinism, and a step that never waits for the device."""
import contextlib, dataclasses, json, threading, time

import pytest, torch
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cl_nscl import store, twins as module
from cl_nscl.core import Params, UserError, run_id
from cl_nscl.data import Stream
from cl_nscl.store import stored_run, train_runs
from cl_nscl.twins import Twins, arithmetic, batch_gradient, cached_gradient, dataset_of, features, load_state, train, twin_batch, twin_state, twin_step

ALL = ("cl", "ntxent", "nscl", "scl", "ce")
P = Params(dataset="digits", n_train=200, size=8, encoder="resnet8", width=0.5, proj_hidden=16, proj_dim=8, B=40, epochs=3, warmup=1, lr=0.05, flip=0, snapshots=3)
DS = dataset_of(P)
run = lambda o, **kw: dataclasses.replace(P, objective=o, **kw)
same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def without_norms(m):
    for b in [*m.modules()]:
        for name, child in b.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm): setattr(b, name, nn.Identity())
    return m


# --- no host synchronisation in the step

class Watch(TorchDispatchMode):
    "Which operations let the host wait for a copy to or from the device. (Reading a number of a meta tensor, or indexing by its values, is an error by itself.)"
    def __init__(self): super().__init__(); self.waits, self.copies = [], 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        crossed = len({t.device.type for t in tree_leaves((args, kwargs, out)) if torch.is_tensor(t)}) > 1
        if crossed and (kwargs or {}).get("non_blocking"): self.copies += 1
        elif crossed: self.waits.append(str(f))
        return out


def watched_steps(n, check=False, ds=None, **kw):
    "On the meta device the code takes the branches of a GPU, and there is nothing that could be read."
    p = dataclasses.replace(P, blur=0.5, **kw)
    tw = Twins([dataclasses.replace(p, objective=o) for o in ALL], ds or dataset_of(p), "meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "autocast", lambda *a, **k: contextlib.nullcontext())              # torch knows none for meta
        twin_step(tw, check=False)                                                            # constants go to the device once
        made = torch.tensor
        def tensor(*a, device=None, **k):                                                     # a list on a device: a copy that no mode sees
            assert device is None or torch.device(device).type == "cpu", "torch.tensor makes the host wait"
            return made(*a, **k)
        patch.setattr(torch, "tensor", tensor)
        with Watch() as w:
            for _ in range(n): twin_step(tw, check=check)
    return w


@pytest.mark.parametrize("kw", [{}, dict(optimizer="lars"), dict(chunk=20), dict(precision="bfloat16"), dict(pairs="all", clip=0.0)])
def test_no_host_synchronisation_in_the_step(kw):
    w = watched_steps(1, **kw)
    assert not w.waits and w.copies == 0


def test_a_new_epoch_hands_over_its_order_and_uniforms_without_a_wait():
    w = watched_steps(2, n_train=80)
    assert not w.waits and w.copies == 2


def test_large_images_are_handed_over_without_a_wait():
    w = watched_steps(1, size=65)
    assert not w.waits and w.copies == 1


def test_streamed_images_are_handed_over_without_a_wait():
    images = [Image.fromarray(x[0].numpy()) for x in DS.train.x]
    ds = dataclasses.replace(DS, train=Stream(images.__getitem__, DS.train.y, torch.arange(len(images)), 1, P.size))
    w = watched_steps(1, ds=ds)
    assert not w.waits and w.copies == 3                                                        # crops, uniforms, labels


def test_the_watch_sees_a_wait():
    with pytest.raises(Exception, match="(?i)meta|data-dependent|item"): watched_steps(1, check=True)         # a look at the losses, asked for
    x = torch.ones(3, device="meta")
    for read in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.nonzero(), lambda: x[x > 0], lambda: x.cpu(), lambda: x.tolist()):
        with pytest.raises((RuntimeError, NotImplementedError)): read()
    with Watch() as w: torch.ones(3).to("meta"); torch.ones(3).to("meta", non_blocking=True)
    assert len(w.waits) == 1 and w.copies == 1


# --- precision

@pytest.mark.parametrize("precision, eps", [("bfloat16", 0.05), ("float16", 0.01)])
def test_mixed_precision_keeps_losses_weights_and_metrics_in_float32(precision, eps):
    full, mixed = (Twins([run(o, precision=q) for o in ALL], DS) for q in ("float32", precision))
    dtypes = []
    mixed.models[0].projector[0].register_forward_hook(lambda m, a, out: dtypes.append(out.dtype))
    h = [torch.cat([*features(tw.models[0], DS.test, tw.spec)]) for tw in (full, mixed)]
    assert torch.equal(*h)                                                                      # evaluation does not use it
    a, b = twin_step(full), twin_step(mixed)
    assert b.dtype == torch.float32 and dtypes == [getattr(torch, precision)] and ((a - b).abs() / a < eps).all() and not torch.equal(a, b)
    assert all(w.dtype == torch.float32 for m in mixed.models for w in m.parameters())
    assert run_id(run("cl", precision=precision)) != run_id(run("cl"))


def test_mixed_precision_trains():
    losses = torch.stack([*train(Twins([run("ce", precision="bfloat16", epochs=8, lr=0.3)], DS))])
    assert losses[-5:].mean() < 0.9 * losses[:5].mean()


def test_O12_an_overflow_is_skipped_in_one_twin_counted_and_said(monkeypatch):
    tw = Twins([run(o, precision="float16") for o in ("cl", "nscl")], DS)
    sick, rates, update = iter([False, False, False, True, False, False]), [], module.update
    def overflow(optimizer, params, clip, scaler):
        params = [*params]
        if next(sick): params[0].grad[:] = float("inf")
        rates.append(optimizer.param_groups[0]["lr"])
        return update(optimizer, params, clip, scaler)
    monkeypatch.setattr(module, "update", overflow)
    twin_step(tw)
    before = [{k: w.detach().clone() for k, w in m.named_parameters()} for m in tw.models]
    with pytest.warns(UserWarning, match=r"step 1 of nscl was skipped: its gradients overflowed in float16 \(1 so far\)"): twin_step(tw)
    after = [dict(m.named_parameters()) for m in tw.models]
    assert not same(before[0], after[0]) and same(before[1], after[1]) and tw.skipped == [0, 1]
    twin_step(tw)
    assert rates[0::2] == rates[1::2] and len({*rates}) == 3                                   # one rate for both, and it moved on


def test_the_scaler_is_part_of_the_state():
    through, half, rest = (Twins([run("cl", precision="float16")], DS) for _ in range(3))
    for tw, n in ((through, 4), (half, 2)):
        tw.scalers[0]._init_scale, tw.scalers[0]._growth_interval = 1024.0, 3
        for _ in range(n): twin_step(tw)
    half.skipped = [5]
    load_state(rest, [twin_state(half, 0)])
    for _ in range(2): twin_step(rest)
    assert same(through.models[0].state_dict(), rest.models[0].state_dict()) and rest.skipped == [5]
    assert rest.scalers[0].get_scale() == through.scalers[0].get_scale() == 2048.0
    assert "scaler" not in twin_state(Twins([run("cl")], DS), 0)


# --- gradient caching

def gradient(fn, chunk, dropout=False, **kw):
    tw = Twins([run(o, chunk=chunk, **kw) for o in ALL], DS)
    for m in tw.models:
        without_norms(m).double()
        if dropout: m.projector.insert(0, nn.Dropout(0.5))
    v, y = twin_batch(tw, 0)
    return [(fn(tw, i, v.double(), y), {k: w.grad for k, w in m.named_parameters()}) for i, m in enumerate(tw.models)]


@pytest.mark.parametrize("chunk", [2, 7, 10, 39])
def test_cached_gradient_is_that_of_the_full_batch_in_float64(chunk):
    for (la, ga), (lb, gb) in zip(gradient(batch_gradient, 0), gradient(cached_gradient, chunk)):
        assert abs(la - lb) < 1e-12 and all((ga[k] - gb[k]).norm() <= 1e-11 * ga[k].norm() for k in ga)


def test_cached_gradient_of_a_batch_of_1024():
    big = dict(n_train=1024, B=1024)
    ds = dataset_of(dataclasses.replace(P, **big))
    grads = []
    for chunk, fn in ((0, batch_gradient), (128, cached_gradient)):
        tw = Twins([run("nscl", chunk=chunk, **big)], ds)
        without_norms(tw.models[0]).double()
        v, y = twin_batch(tw, 0)
        grads.append((fn(tw, 0, v.double(), y), torch.cat([w.grad.flatten() for w in tw.models[0].parameters()])))
    (la, a), (lb, b) = grads
    assert abs(la - lb) < 1e-12 and (a - b).norm() < 1e-11 * a.norm()


def test_gradients_of_small_batches_added_up_are_something_else():
    tw = Twins([run("cl")], DS)
    without_norms(tw.models[0]).double()
    v, y = twin_batch(tw, 0)
    full = batch_gradient(tw, 0, v.double(), y)
    assert abs(full - torch.stack([batch_gradient(tw, 0, v[:, a:a + 10].double(), y[a:a + 10]) for a in range(0, 40, 10)]).mean()) > 0.5


def test_cached_dropout_is_replayed_exactly():
    tw = Twins([run("cl", chunk=10)], DS)
    tw.models[0].projector.insert(0, nn.Dropout(0.5))
    seen, dropped = [], []
    tw.models[0].register_forward_hook(lambda m, a, out: seen.append(out[1].detach().clone()))
    tw.models[0].projector[0].register_forward_hook(lambda m, a, out: dropped.append(out == 0))
    twin_step(tw)
    assert len(seen) == 8 and all(map(torch.equal, seen[:4], seen[4:])) and not torch.equal(dropped[0], dropped[1])
    masks = [[], []]
    for i, o in enumerate(("cl", "nscl")):                                                      # and it is the same for every twin
        t = Twins([run(o, chunk=10)], DS)
        t.models[0].projector.insert(0, nn.Dropout(0.5))
        t.models[0].projector[0].register_forward_hook(lambda m, a, out, i=i: masks[i].append(out == 0))
        twin_step(t)
    assert all(map(torch.equal, *masks))


def test_batch_norm_sees_chunks():
    "Its output is that of each chunk alone; its running statistics move once for each chunk, not twice."
    tw = Twins([run("cl", chunk=20)], DS)
    alone, norm = Twins([run("cl")], DS).models[0], tw.models[0].encoder.bn1
    v, y = twin_batch(tw, 0)
    alone.train()
    z = torch.cat([alone(v[:, a:a + 20].flatten(0, 1))[1].unflatten(0, (2, 20)) for a in (0, 20)], 1)
    expected = module.OBJECTIVES["cl"].fn(z, y, P.tau, P.pairs)
    assert abs(twin_step(tw)[0] - expected) < 1e-5 and norm.num_batches_tracked == 2
    for a, b in ((norm.running_mean, alone.encoder.bn1.running_mean), (norm.running_var, alone.encoder.bn1.running_var)): assert (a - b).abs().max() < 1e-6
    assert abs(twin_step(Twins([run("cl")], DS))[0] - expected) > 1e-4                          # than at once: another function of the batch


def test_a_chunk_of_the_whole_batch_is_no_chunk():
    a, b = (Twins([run("cl", chunk=c)], DS) for c in (0, 40))
    for _ in range(2): twin_step(a); twin_step(b)
    assert same(a.models[0].state_dict(), b.models[0].state_dict())
    with pytest.raises(UserError, match="chunk = 1"): Twins([run("cl", chunk=1)], DS)


def test_cached_training_resumes_and_ignores_its_company():
    def weights(objectives): 
        tw = Twins([run(o, chunk=15) for o in objectives], DS)
        for _ in range(3): twin_step(tw)
        return tw.models[0].state_dict()
    assert same(weights(["cl"]), weights(["cl", "ce", "nscl"]))


# --- compile, deterministic

def test_compiled_networks_keep_their_names_and_results(monkeypatch):
    plain, calls = nn.Module.compile, []
    monkeypatch.setattr(nn.Module, "compile", lambda m, **kw: (calls.append(kw), plain(m, backend="aot_eager", **kw)))
    a, b = Twins([run(o) for o in ("cl", "ce")], DS), Twins([run(o, compile=1) for o in ("cl", "ce")], DS)
    for _ in range(2): assert torch.allclose(twin_step(a), twin_step(b), atol=1e-4)
    assert calls == [dict(dynamic=False)] * 2 and [m.state_dict().keys() for m in a.models] == [m.state_dict().keys() for m in b.models]


def test_compiled_dropout_is_replayed_exactly(monkeypatch):
    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda m, **kw: plain(m, backend="aot_eager", **kw))
    tw = Twins([run("cl", chunk=20, compile=1)], DS)
    tw.models[0].projector.insert(0, nn.Dropout(0.5))
    seen, outputs = [], module.twin_outputs
    monkeypatch.setattr(module, "twin_outputs", lambda *a: (seen.append(out := outputs(*a)), out)[1])
    twin_step(tw)
    assert len(seen) == 4 and torch.equal(seen[0], seen[2]) and torch.equal(seen[1], seen[3])


def test_R21_deterministic_mode_switches_and_is_recorded(tmp_path):
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    inside = []
    def report(*_): inside.append(torch.are_deterministic_algorithms_enabled())
    runs = [stored_run(run("cl", epochs=1, deterministic=d), tmp_path) for d in (0, 1)]
    for r in runs: train_runs([r], report=report)
    plain, strict = (json.loads((r.path/"done.json").read_text()) for r in runs)
    assert (plain["deterministic"], strict["deterministic"], strict["cudnn_benchmark"]) == (False, True, False)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before and not any(inside)
    a, b = (store.load_snapshot(r, 5) for r in runs)
    assert runs[0].id != runs[1].id and same(a, b)                                              # on a CPU the bits are the same


def test_R21_a_gpu_picks_the_fastest_convolution_unless_told_otherwise():
    gpu = torch.device("cuda")
    with arithmetic(P, gpu): assert torch.backends.cudnn.benchmark and not torch.are_deterministic_algorithms_enabled()
    with arithmetic(dataclasses.replace(P, deterministic=1), gpu): assert not torch.backends.cudnn.benchmark and torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


# --- snapshots beside training

def test_snapshots_do_not_stall_the_step(tmp_path, monkeypatch):
    "A file that takes long is written while training goes on, and holds the weights of its own step."
    write, active, during = store.write_atomic, threading.Event(), []
    def slow(path, data):
        if "snapshot-00000005" in path.name: active.set(); time.sleep(0.5); active.clear()
        return write(path, data)
    monkeypatch.setattr(store, "write_atomic", slow)
    r = stored_run(run("cl"), tmp_path)
    train_runs([r], report=lambda gained, t, loss: during.append((t, active.is_set())))
    assert sum(busy for _, busy in during) >= 2 and r.done
    monkeypatch.undo()
    tw = Twins([run("cl")], DS)
    for _ in train(tw):
        if tw.t in r.snapshots: assert same(store.load_snapshot(r, tw.t), tw.models[0].state_dict())


def test_an_error_of_the_writer_stops_the_run(tmp_path, monkeypatch):
    def full(path, data):
        if "snapshot-00000005" in path.name: raise OSError("No space left on device")
        return write(path, data)
    write = store.write_atomic
    monkeypatch.setattr(store, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"): train_runs([stored_run(run("cl"), tmp_path)])
    monkeypatch.undo()
    r = stored_run(run("cl"), tmp_path)
    train_runs([r])
    assert r.done and json.loads((r.path/"done.json").read_text())["first_step"] == 0


# --- the bench measures the step that is taken

def test_the_phases_of_the_bench_are_the_step(root):
    import importlib.util
    spec = importlib.util.spec_from_file_location("bench_step", root/"bench/step.py")
    spec.loader.exec_module(bench := importlib.util.module_from_spec(spec))
    a, b = (Twins([run(o) for o in ("cl", "ce")], DS) for _ in range(2))
    for _ in range(2):
        twin_step(a)
        assert {*bench.phased_step(b, bench.Clock(a.device))} == {*bench.PHASES}
    assert all(same(m.state_dict(), n.state_dict()) for m, n in zip(a.models, b.models)) and a.t == b.t
    assert bench.flops(P, DS) > 1e6
