"""The command `cl-nscl bound`: what it prints is what the bounds say, and a mistake is one line."""
import argparse, dataclasses, math

import numpy as np, pytest, torch

from cl_nscl.bounds import eps, log_theorem1
from cl_nscl.calculator import Setting, add_command, calculate, log_drifts, prescribe
from cl_nscl.core import UserError
from cl_nscl.dynamics import descend
from cl_nscl.data import batches


def run(line, capsys):
    top = argparse.ArgumentParser("cl-nscl")
    add_command(top.add_subparsers(dest="command"))
    args = top.parse_args(["bound", *line.split()])
    args.fn(args)
    return capsys.readouterr().out


def test_help_names_every_argument_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as stop: run("--help", capsys)
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for f in dataclasses.fields(Setting):
        assert "--" + f.name.replace("_", "-") in out and f.metadata["doc"] in out
    assert "--target-cka" in out and "2510.08852" in out


@pytest.mark.parametrize("line, says", [("--tau 0", "tau"), ("--tau hot", "tau = 'hot'"), ("--C 1", "C"), ("--B 2.5", "B = 2.5"), ("--delta 1", "delta"), ("--N 10", "B = 1024"), ("--eta nan", "eta"),
    ("--eta inf", "eta"), ("--T 0", "T"), ("--k-norm -1", "k_norm"), ("--sigma-d 2", "sigma_d"), ("--pi-max 0.05", "pi_max"), ("--target-cka 0.9", "k_norm"), ("--k-norm 10 --target-cka 1.5", "target_cka"),
    ("--k-norm 10 --target-cka 1", "target_cka"), ("--eta-sum 1e12", "eta_sum")])
def test_a_mistake_is_one_line_that_names_the_argument(line, says, capsys):
    with pytest.raises(UserError) as error: run(line, capsys)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_printed_numbers_are_those_of_the_function(capsys):
    out = run("--C 100 --B 250 --N 1000 --tau 1 --T 400 --eta 1 --k-norm 20 --sigma-d 0.2", capsys)
    table = calculate(Setting(C=100, B=250, N=1000, tau=1.0, T=400, eta=1.0, k_norm=20.0, sigma_d=0.2))
    for r in table.itertuples():
        if r.log10 > 6: continue
        assert f"{r.value:.4g}" in out
    assert set(table.scale) == {"given", "at most 2000"}


def test_what_nobody_gave_is_said_and_a_best_case_is_no_guarantee(capsys):
    "A user of ImageNet who gives C, B and tau alone must notice that N and T are CIFAR's."
    out = run("--C 1000 --B 1024 --tau 0.1", capsys)
    assert out.splitlines()[:2] == ["given: C = 1000, B = 1024, tau = 0.1", "assumed: N = 50000, T = 57600, eta = 0.6, delta = 0.01 (defaults for the paper's CIFAR-10 run); give --N, --T, --eta, --delta"]
    assert "pi_max = 1/C = 0.001" in out and "CKA: no guarantee, the best case ||K|| = N = 50000" in out and "--k-norm" in out and "RSA: no guarantee" in out and "note" in out
    out = run("--N 1281167", capsys)
    assert "note: T = 57600 steps are 46.04 epochs of N = 1281167; for E epochs give --T 1251 x E" in out
    out = run("--C 100 --pi-max 0.01 --B 250 --N 1000 --tau 1 --T 400 --eta-sum 100 --delta 0.01 --k-norm 20 --sigma-d 0.2", capsys)
    assert not any(word in out for word in ("assumed", "guarantee", "best case", "note", "eta = "))


@pytest.mark.parametrize("seed", range(20))
def test_bounds_stay_in_order_and_in_range_at_random_settings(seed):
    g = np.random.default_rng(seed)
    B = int(2 ** g.uniform(3, 11))
    s = Setting(C=int(2 ** g.uniform(1, 10)), B=B, N=int(B * 2 ** g.uniform(0.5, 6)), tau=float(2 ** g.uniform(-4, 1)), T=int(10 ** g.uniform(0, 4)), eta=float(10 ** g.uniform(-3, 3)))
    logs, table = log_drifts(s), calculate(s)
    assert not any(math.isnan(v) for v in logs.values())
    assert logs["ours, epochs"] <= logs["ours"] + 1e-9
    if s.eta <= 4 * s.tau**2 * B and s.pi_max + eps(s.T, B, s.delta) < 1: assert logs["ours"] <= logs["paper"] + 1e-9
    similar = table[table.quantity != "drift"]
    assert similar.value.between(-1, 1).all() and (similar.vacuous == (similar.value <= 0)).all()
    drift = table[table.quantity == "drift"]
    assert (drift.vacuous == (drift.log10 >= math.log10(2 * s.N))).all() or np.isclose(drift.log10, math.log10(2 * s.N)).any()


def test_huge_bounds_stay_finite_in_logarithms():
    s = Setting(tau=0.05, T=10**6, B=64, N=6400, eta=0.64)
    drift = calculate(s).query("quantity == 'drift' and source == 'paper'").iloc[0]
    assert drift.value == math.inf and 1e5 < drift.log10 < math.inf
    assert drift.log10 == pytest.approx(log_theorem1(6.4e5, 0.05, 64, 0.1, eps(10**6, 64, 0.01)) / math.log(10), rel=1e-9)


@pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
def test_each_prescription_is_enough_and_a_little_less_is_not(target):
    s = Setting(C=20, B=200, N=2000, tau=0.7, T=300, eta=0.5, k_norm=40.0)
    need = prescribe(s, target).set_index("parameter").needed
    cka = lambda **kw: calculate(dataclasses.replace(s, **kw)).set_index(["quantity", "source"]).value["CKA", "ours"]
    assert cka(eta_sum=need["eta_sum"] * (1 - 1e-9)) >= target > cka(eta_sum=need["eta_sum"] * 1.001)
    assert cka(tau=need["tau"] * (1 + 1e-9)) >= target > cka(tau=need["tau"] * 0.999)
    for p in ("C", "B"):
        if math.isfinite(need[p]): assert cka(**{p: int(need[p])}) >= target
    if math.isfinite(need["C"]) and need["C"] > 2: assert cka(C=int(need["C"]) - 1) < target


def test_similarity_descent_stays_within_the_calculated_drift():
    g = torch.Generator().manual_seed(0)
    z = torch.nn.functional.normalize(torch.randn(120, 8, generator=g).double(), dim=1)
    y = torch.arange(120) % 4
    for eta in (5.0, 40.0):                                      # below and beyond 4 tau^2 B = 30
        stream = torch.cat([batches(0, e, 120, 30) for e in range(5)])
        for d in descend(z @ z.T, y, stream.numpy(), eta, 0.5, every=20): pass
        drift = (d.Sigma[0] - d.Sigma[1]).norm().item()
        for source, log in log_drifts(Setting(C=4, B=30, N=120, tau=0.5, T=20, eta=eta)).items(): assert math.log(drift) <= log, source
