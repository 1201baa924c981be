"""The premise of the paper as tests: twins share everything but the objective, and nothing else decides a run."""
import dataclasses, os, signal, subprocess, sys, time, warnings

import pandas as pd, pytest, torch

from cl_nscl.core import Params, UserError, run_id
from cl_nscl.data import batches, loader
from cl_nscl.models import build_twin
from cl_nscl.store import ending, history, load_snapshot, stored_run, train_runs
from cl_nscl.twins import Diverged, Twins, check_batches, dataset_of, features, train, twin_state, twin_step
from cl_nscl.views import uniforms, views

P = Params(dataset="digits", n_train=200, size=16, encoder="resnet8", proj_hidden=32, proj_dim=16, B=50, epochs=3, warmup=1, lr=0.1, flip=0, snapshots=3)
DS = dataset_of(P)
run = lambda o, **kw: dataclasses.replace(P, objective=o, **kw)
same = lambda a, b: a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def trained(objectives, steps=None, **kw):
    twins = Twins([run(o, **kw) for o in objectives], DS)
    for _ in train(twins):
        if twins.t == steps: break
    return [m.state_dict() for m in twins.models]


@pytest.mark.parametrize("objective", ["cl", "ntxent", "nscl", "scl", "ce"])
def test_R13_null_twins_are_one_model_at_every_step(objective):
    twins = Twins([run(objective)] * 2, DS)
    for losses in train(twins):
        assert losses[0] == losses[1]
        assert same(*(m.state_dict() for m in twins.models))
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in twins.models)))


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_R17_order_and_company_of_twins_do_not_matter(optimizer):
    alone = trained(["cl"], optimizer=optimizer)[0]
    assert same(alone, trained(["cl", "nscl"], optimizer=optimizer)[0])
    assert same(alone, trained(["nscl", "cl"], optimizer=optimizer)[1])
    assert same(alone, trained(["ce", "scl", "cl", "nscl"], optimizer=optimizer)[2])


def test_R17_dropout_draws_the_same_for_every_twin():
    def noisy(objectives):
        twins = Twins([run(o) for o in objectives], DS)
        for m in twins.models: m.projector.insert(0, torch.nn.Dropout(0.5))
        for _ in train(twins): pass
        return [m.state_dict() for m in twins.models]
    a, b = noisy(["cl", "cl"])
    assert same(a, b) and same(a, noisy(["nscl", "cl"])[1])


def test_training_and_evaluation_leave_global_randomness_alone():
    torch.manual_seed(3)
    state = torch.get_rng_state()
    twins = Twins([run("cl"), run("ce")], DS)
    twin_step(twins)
    list(features(twins.models[0], DS.test, twins.spec))
    assert torch.equal(state, torch.get_rng_state())


def test_evaluation_between_steps_changes_nothing():
    plain = trained(["cl"])[0]
    twins = Twins([run("cl")], DS)
    for _ in train(twins): list(features(twins.models[0], DS.train, twins.spec))
    assert same(plain, twins.models[0].state_dict())


def test_R01_seeds_and_epochs_differ():
    twins, other = Twins([run("cl")], DS), Twins([run("cl", seed=1)], DS)
    from cl_nscl.twins import twin_batch
    a, b, c = twin_batch(twins, 0)[0], twin_batch(twins, twins.clock.per_epoch)[0], twin_batch(other, 0)[0]
    assert not torch.equal(a, b) and not torch.equal(a, c)


def test_a_control_shares_the_start_and_nothing_of_batches_and_views():
    from cl_nscl.twins import twin_batch
    twins, control, seven = Twins([run("cl")], DS), Twins([run("cl", stream_seed=7)], DS), Twins([run("cl", seed=7)], DS)
    assert same(twins.models[0].state_dict(), control.models[0].state_dict())
    assert not same(seven.models[0].state_dict(), control.models[0].state_dict())
    for t in (0, 1, twins.clock.per_epoch):
        (v, y), (u, z), (w, x) = (twin_batch(twins, t), twin_batch(control, t), twin_batch(seven, t))
        assert not torch.equal(v, u) and not torch.equal(y, z) and torch.equal(u, w) and torch.equal(z, x)      # the batches of seed 7
    twin_step(twins), twin_step(control)
    assert not same(twins.models[0].state_dict(), control.models[0].state_dict())
    with pytest.raises(ValueError, match="agree in every parameter but the objective"): Twins([run("cl"), run("nscl", stream_seed=7)], DS)


def test_stream_seed_at_its_default_changes_no_run():
    assert run_id(P) == run_id(run("cl", stream_seed=-1)) != run_id(run("cl", stream_seed=P.seed))
    assert same(trained(["cl"], 3)[0], trained(["cl"], 3, stream_seed=P.seed)[0])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_R09_loader_workers_do_not_change_views(workers):
    from cl_nscl.data import batches
    from cl_nscl.twins import twin_batch
    twins = Twins([run("cl")], DS)
    u = uniforms(0, 0, len(DS.train), P.K)
    for t, (i, x, y) in enumerate(loader(DS.train, batches(0, 0, len(DS.train), P.B), workers)):
        v, labels = twin_batch(twins, t)
        assert torch.equal(views(x, u[i], twins.spec), v) and torch.equal(y, labels)


CHILD = """
import sys, torch
torch.set_num_threads(1)
from tests.test_twins import P, run
from cl_nscl.store import stored_run, train_runs
train_runs([stored_run(run(o), sys.argv[1]) for o in ("cl", "nscl", "scl", "ce")], minutes=0)
"""


def child(folder, root):
    env = os.environ | {"PYTHONPATH": f"{root}"}
    return subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_R01_killed_and_resumed_in_new_processes_is_the_same_run(tmp_path, root):
    "Killed without warning a few times, resumed by new processes: every twin's history and every snapshot is equal to the last bit."
    runs = lambda d: [stored_run(run(o), d) for o in ("cl", "nscl", "scl", "ce")]
    train_runs(runs(tmp_path/"through"))
    for after in (2, 6):  # checkpoints seen before the kill
        process, seen = child(tmp_path/"killed", root), set()
        while process.poll() is None and len(seen) < after:
            seen |= {p.name for p in (tmp_path/"killed").rglob("checkpoint-*")} if (tmp_path/"killed").exists() else set()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL); process.wait()
    process = child(tmp_path/"killed", root)
    assert process.wait(timeout=120) == 0, process.stderr.read()
    for a, b in zip(runs(tmp_path/"through"), runs(tmp_path/"killed")):
        assert b.done and [f.name for f in a.snapshots.values()] == [f.name for f in b.snapshots.values()]
        assert (a.path/"history.csv").read_bytes() == (b.path/"history.csv").read_bytes()


def test_R19_the_last_update_is_stored_and_a_finished_run_trains_nothing(tmp_path):
    runs, steps = [stored_run(run("cl"), tmp_path)], []
    train_runs(runs, report=lambda gained, t, loss: steps.append(t))
    assert max(runs[0].snapshots) == 12 == max(steps)
    assert same(load_snapshot(runs[0], 12), trained(["cl"])[0])
    train_runs(runs, report=lambda *_: steps.append("again"))
    assert "again" not in steps


def test_R20_history_holds_each_epoch_once_after_a_resume(tmp_path):
    class Stop(Exception): pass
    def stop(gained, t, loss):
        if t == 6: raise Stop
    runs = [stored_run(run("cl"), tmp_path)]
    with pytest.raises(Stop): train_runs(runs, report=stop)
    assert pd.read_csv(runs[0].path/"history.csv").epoch.tolist() == [1]
    train_runs(runs)
    assert pd.read_csv(runs[0].path/"history.csv").epoch.tolist() == [1, 2, 3]


def test_diverged_run_leaves_a_usable_checkpoint(tmp_path, monkeypatch):
    "A loss that is no number stops the run; mended, the same call continues from the last good checkpoint and ends where an undisturbed run ends."
    import cl_nscl.twins as module
    from cl_nscl.losses import OBJECTIVES
    healthy, calls = OBJECTIVES["nscl"], []
    def sick(z, y, tau, pairs):
        calls.append(1)
        return healthy.fn(z, y, tau, pairs) * (float("nan") if len(calls) > 6 else 1)
    monkeypatch.setitem(OBJECTIVES, "nscl", dataclasses.replace(healthy, fn=sick))
    runs = [stored_run(run(o), tmp_path) for o in ("cl", "nscl")]
    with pytest.raises(Diverged, match=r"loss of nscl became nan at step 4; last good checkpoint: .*checkpoint-00000004"): train_runs(runs)
    assert runs[0].done and not runs[1].done # after step 6 each went on alone from its checkpoint, and the healthy one to its end
    monkeypatch.setitem(OBJECTIVES, "nscl", healthy)
    train_runs(runs)
    assert same(load_snapshot(runs[1], 12), trained(["cl", "nscl"])[1])


def test_L16_a_ragged_rest_is_left_out_and_a_batch_larger_than_the_set_is_refused():
    twins = Twins([run("cl", B=60)], DS)
    assert twins.clock.per_epoch == 3
    with pytest.raises(ValueError, match="B = 201: larger than the training set of 200 samples"): Twins([run("cl", B=201)], DS)


def test_D13_a_batch_of_one_class_is_refused_before_training():
    "NSCL has no negatives there. The order of every epoch is known, so no step is lost, and CL is not trained in vain."
    ds = dataset_of(q := run("nscl", classes=(7, 2), n_train=40, B=2, B_ref=2, epochs=1))
    with pytest.raises(UserError, match=r"parameter B = 2: batch \d+ of epoch 0 \(seed 0\) would hold images of class [72] alone.*choose a larger B") as e:
        Twins([dataclasses.replace(q, objective="cl"), q], ds)
    assert "\n" not in str(e.value)
    Twins([dataclasses.replace(q, objective=o) for o in ("cl", "scl", "ce")], ds)                  # have no need of another class
    q = dataclasses.replace(q, B=20)
    for _ in train(Twins([q], ds)): pass


@pytest.mark.parametrize("drawn", ["seed", "stream_seed"])
def test_D13_every_batch_of_every_epoch_is_looked_at(drawn):
    "What is let through never meets such a batch, what is refused would have; also where a run draws other batches than its seed's."
    y, said = torch.arange(12) % 2, []
    for seed in range(30):
        q = run("nscl", B=4, epochs=2, **{drawn: seed})
        alone = any(len(y[b].unique()) == 1 for e in range(2) for b in batches(seed, e, 12, 4))
        try: check_batches(q, y, (7, 2))
        except UserError: said.append(True)
        else: said.append(False)
        assert said[-1] == alone
    assert 0 < sum(said) < 30


def test_L09_a_collapsed_encoder_is_hinted_at_once_and_recorded(tmp_path, monkeypatch):
    "An encoder of constant output: each contrastive loss sits at its value for identical projections."
    class Constant(torch.nn.Module):
        feature_dim = 8
        def forward(self, x): return x.new_ones(len(x), 8)
    def built(*a, **k):
        m = build_twin(*a, **k)
        m.encoder, m.projector[0] = Constant(), torch.nn.Linear(8, 32, bias=False)
        torch.nn.init.ones_(m.projector[-1].bias)
        return m
    monkeypatch.setattr("cl_nscl.twins.build_twin", built)
    monkeypatch.setattr("cl_nscl.store.encoder_record", lambda f: {})
    runs = [stored_run(run(o), tmp_path) for o in ("cl", "nscl", "ntxent", "scl", "ce")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train_runs(runs)
    hints = [str(w.message) for w in said if "has the model collapsed?" in str(w.message)]
    assert sorted(h.split()[3] for h in hints) == ["cl", "nscl", "ntxent", "scl"]                  # once each, and nothing of CE
    assert [ending(r.path).get("collapsed") for r in runs] == [[4, 8, 12]] * 4 + [None]


def test_L09_a_run_that_learns_has_no_hint(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_runs(runs := [stored_run(run(o), tmp_path) for o in ("cl", "nscl")])
    for r in runs: assert "collapsed" not in ending(r.path)


def test_L16_images_that_no_batch_holds_are_recorded(tmp_path):
    train_runs([r := stored_run(run("cl", B=60, epochs=1), tmp_path)])
    assert ending(r.path)["dropped"] == 20


def test_names_of_runs_do_not_change_by_accident():
    "Stored runs are found by this name: a change here orphans every run that people have."
    assert run_id(Params()) == "9bb5d0cc6013"


def test_P08_every_parameter_of_every_twin_gets_a_gradient():
    twins = Twins([run(o) for o in ("cl", "ntxent", "nscl", "scl", "ce")], DS)
    twin_step(twins)
    for m in twins.models: assert all(p.grad is not None for p in m.parameters())


