"""Feature files: round trips, bounded memory, refusals in one line, fuzz; checkpoints; the command."""
import argparse, dataclasses, json, math, os, pickle, struct, subprocess, sys, warnings, zipfile

import numpy as np, pytest, torch
from PIL import Image
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file

from cl_nscl import compare as module
from cl_nscl.compare import FORMATS, add_command, compare, open_checkpoint, open_features
from cl_nscl.core import Params, UserError, generator
from cl_nscl.intervals import intervals
from cl_nscl.measure import load_model
from cl_nscl.probes import fit_linear_probe
from cl_nscl.similarity import similarities
from cl_nscl.store import stored_run, train_runs
from cl_nscl.twins import dataset_of, features
from cl_nscl.views import view_spec


def normal(*shape, seed=0, dtype=torch.float32): return torch.randn(*shape, generator=generator(seed, "test", *shape), dtype=dtype)


def write(path, h, **beside):
    all_ = {"h": h, **beside}
    if path.suffix == ".npy": np.save(path, h.numpy())
    if path.suffix == ".npz": np.savez_compressed(path, **{k: v.numpy() for k, v in all_.items()})
    if path.suffix == ".safetensors": save_file(all_, path)
    if path.suffix == ".pt": torch.save(all_, path)
    return path


def read(path, n=7): return torch.cat([*open_features(path).chunks(n)])


def command(*args):
    top = argparse.ArgumentParser()
    add_command(top.add_subparsers())
    args = top.parse_args(["compare", *map(str, args)])
    return args.fn(args)


def refused(fn, *words):
    with pytest.raises(UserError) as e: fn()
    text = str(e.value)
    assert "\n" not in text and len(text) < 700 and text.isprintable(), text
    for w in words: assert w in text, (w, text)


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int32, torch.uint8])
def test_round_trip(tmp_path, ending, dtype):
    h = (20 * normal(53, 5, dtype=torch.float64)).abs().to(dtype)
    path = write(tmp_path/f"f{ending}", h)
    for n in (1, 7, 53, 1000): assert torch.equal(read(path, n).double(), h.double())


@pytest.mark.parametrize("ending", FORMATS)
def test_compare_of_files_equals_tensors_in_memory(tmp_path, ending):
    hs = {"a": normal(1500, 8), "b": normal(1500, 8) + normal(1500, 8, seed=1), "c": normal(1500, 3, seed=2)}
    table = compare({n: write(tmp_path/f"{n}{ending}", h) for n, h in hs.items()}, chunk=333)
    point = similarities(hs).query("metric in @module.PAIR_METRICS")
    assert table[["a", "b", "metric"]].values.tolist() == point[["a", "b", "metric"]].values.tolist()
    assert np.allclose(table.value, compare(hs).value, rtol=0, atol=1e-9) and np.allclose(table.value, point.value, rtol=1e-6)
    want = intervals(hs).query("metric in @module.PAIR_METRICS")
    assert np.allclose(table.low, want.low, rtol=1e-6) and np.allclose(table.high, want.high, rtol=1e-6)


@pytest.mark.parametrize("other", [np.asfortranarray, lambda h: 1e30 * h, lambda h: h + 1e-7 * np.sin(h)], ids=["fortran", "scaled", "rounding"])
def test_features_that_are_equal_but_for_rounding_have_an_interval(tmp_path, monkeypatch, other):
    "A tiny drift that no other rows would change: its influences would be noise, and its interval without an end."
    monkeypatch.chdir(tmp_path)
    h = np.random.default_rng(0).normal(size=(50, 8))
    for dtype in ("f4", "f8"):
        np.save("a.npy", h.astype(dtype)); np.save("b.npy", other(h.astype(dtype)))
        table = compare(dict(a="a.npy", b="b.npy")).set_index("metric")
        drift = table.loc["drift"]
        assert np.isfinite(table[["value", "low", "high"]].astype(float).to_numpy()).all() and drift.low == drift.value == drift.high < 1e-4 and table.value["cka"] > 0.999999


def test_other_ways_to_store_an_array(tmp_path):
    h = normal(40, 6).numpy()
    np.save(tmp_path/"f.npy", np.asfortranarray(h)); np.save(tmp_path/"big.npy", h.astype(">f4")); np.save(tmp_path/"long.npy", h.astype(np.longdouble))
    for name in ("f", "big", "long"): assert np.array_equal(read(tmp_path/f"{name}.npy").numpy(), h)
    with open(tmp_path/"v2.npy", "wb") as f: np.lib.format.write_array(f, h, version=(2, 0))
    assert np.array_equal(read(tmp_path/"v2.npy").numpy(), h)
    np.savez(tmp_path/"plain.npz", h)
    assert np.array_equal(read(tmp_path/"plain.npz").numpy(), h)
    torch.save(torch.from_numpy(h).T.contiguous().T, tmp_path/"t.pt")
    assert np.array_equal(read(tmp_path/"t.pt").numpy(), h)
    save_file({"x": torch.from_numpy(h).bfloat16()}, tmp_path/"b.safetensors")
    assert read(tmp_path/"b.safetensors").dtype == torch.bfloat16
    np.savez(tmp_path/"columns.npz", h=np.asfortranarray(h))
    refused(lambda: read(tmp_path/"columns.npz"), "column by column", "ascontiguousarray")


MEMORY = """
import resource, sys, torch
torch.set_num_threads(1)
from cl_nscl.compare import compare
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
compare({n: torch.randn(500, 64) for n in "ab"})
start = peak()
t = compare(dict(zip("ab", sys.argv[1:])), chunk=2048)
print(peak() - start, t.value[0])
"""


def test_memory_does_not_grow_with_the_rows(tmp_path):
    h, g = [np.random.default_rng(i).standard_normal((200_000, 64), dtype=np.float32) for i in range(2)]            # 51 MB each
    np.save(tmp_path/"a.npy", h); np.savez(tmp_path/"b.npz", h=g)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path/"a.npy", tmp_path/"b.npz"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown, value = map(float, done.stdout.split())
    assert grown < 45 and 0 < value < 0.01, (grown, value)                                                          # less than one of the files


def test_more_models_than_fit_do_not_start(tmp_path):
    h = torch.zeros(1).expand(4, 10**7)
    refused(lambda: compare({"a": h, "b": h}), "GiB of sums")


def test_wrong_numbers_are_refused(tmp_path):
    bad = {"one": np.zeros(5), "three": np.zeros((2, 3, 4)), "text": np.array([["a", "b"]]), "complex": np.zeros((3, 2), complex),
           "bool": np.zeros((3, 2), bool), "none": np.zeros((0, 3)), "thin": np.zeros((3, 0)), "date": np.zeros((3, 2), "M8[s]"), "zero": np.float64(3)}
    for name, a in bad.items():
        np.save(tmp_path/f"{name}.npy", a); np.savez(tmp_path/f"{name}.npz", h=a)
        for path in (tmp_path/f"{name}.npy", tmp_path/f"{name}.npz"): refused(lambda: open_features(path), str(path), "must be real numbers [N, d]")
    for name, t in {"bool": torch.zeros(3, 2) > 0, "complex": torch.zeros(3, 2) + 1j, "sparse": torch.zeros(3, 2).to_sparse(), "one": torch.zeros(3)}.items():
        torch.save({"h": t}, tmp_path/f"{name}.pt")
        refused(lambda: open_features(tmp_path/f"{name}.pt"), f"{name}.pt", "must be real numbers [N, d]")


class Evil:
    def __reduce__(self): return (os.mkdir, (str(self.at),))


def test_no_pickle_is_ever_run(tmp_path):
    evil = Evil(); evil.at = tmp_path/"ran"
    a = np.empty((2, 2), object); a[:] = evil
    np.save(tmp_path/"o.npy", a, allow_pickle=True); np.savez(tmp_path/"o.npz", h=a); torch.save({"h": evil}, tmp_path/"o.pt")
    (tmp_path/"p.npy").write_bytes(pickle.dumps(evil)); (tmp_path/"p.pt").write_bytes(pickle.dumps(evil))
    for name in ("o.npy", "o.npz", "o.pt", "p.npy", "p.pt"): refused(lambda: read(tmp_path/name), name)
    assert not (tmp_path/"ran").exists()


@pytest.mark.parametrize("ending", FORMATS)
def test_damaged_files_are_refused(tmp_path, ending):
    path = write(tmp_path/f"f{ending}", normal(300, 5))
    whole = path.read_bytes()
    for n in (0, 1, 9, 60, 700, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n])
        refused(lambda: read(path), str(path))


def header(shape, size=None, descr="<f8"):
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text) if size is None else size) + text.encode()


def test_headers_that_claim_too_much(tmp_path):
    for k, head in enumerate([header((10**15, 4)), header((10**30, 10**30)), header((-1, 4)), header((3, 4), size=60_000), header((3, 4), descr="<f999"),
                              b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 100, b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 70_000]):
        path, npz = tmp_path/f"{k}.npy", tmp_path/f"{k}.npz"
        path.write_bytes(head + bytes(64))
        with zipfile.ZipFile(npz, "w", zipfile.ZIP_DEFLATED) as z: z.writestr("h.npy", head + bytes(64))
        refused(lambda: read(path), str(path)); refused(lambda: read(npz), str(npz))
    refused(lambda: read(tmp_path/"0.npy"), "cut short")
    claim = json.dumps({"h": {"dtype": "F32", "shape": [10**15, 4], "data_offsets": [0, 16 * 10**15]}}).encode()
    (tmp_path/"s.safetensors").write_bytes(struct.pack("<Q", len(claim)) + claim + bytes(64))
    (tmp_path/"t.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    for name in "st": refused(lambda: read(tmp_path/f"{name}.safetensors"), f"{name}.safetensors")


def test_names_inside_an_archive_are_only_names(tmp_path):
    inside = tmp_path/"inside"; inside.mkdir()
    with zipfile.ZipFile(inside/"f.npz", "w") as z:
        for name in ("../../out.npy", "/abs.npy", "..\\win.npy"): z.writestr(name, header((2, 2), descr="<f4") + np.eye(2, dtype="f4").tobytes())
        z.writestr("evil\x1b\n.npy", header((2, 2), descr="<f4") + bytes(16))
    refused(lambda: open_features(inside/"f.npz"), "name it as FILE:KEY")
    assert torch.equal(torch.cat([*open_features(f"{inside/'f.npz'}:../../out").chunks(1)]), torch.eye(2))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["f.npz", "inside"]
    with warnings.catch_warnings(), zipfile.ZipFile(inside/"two.npz", "w") as z:
        warnings.simplefilter("ignore")
        for _ in range(2): z.writestr("h.npy", header((2, 2), descr="<f4") + bytes(16))
    refused(lambda: open_features(inside/"two.npz"), "two arrays")
    with zipfile.ZipFile(inside/"long.npz", "w") as z: z.writestr("h.npy", header((2, 2), descr="<f4") + bytes(99))
    refused(lambda: read(inside/"long.npz"), "longer than its header")


def test_files_that_are_none(tmp_path):
    (tmp_path/"f.csv").write_text("1,2"); (tmp_path/"e.npz").write_bytes(b""); save_file({}, tmp_path/"e.safetensors"); torch.save([1, 2], tmp_path/"l.pt"); torch.save({}, tmp_path/"e.pt")
    refused(lambda: open_features(tmp_path/"f.csv"), ".npy, .npz, .safetensors, .pt")
    refused(lambda: open_features(tmp_path/"nothing.npy"), "no such file")
    refused(lambda: open_features(tmp_path), "no such file")
    for name in ("e.npz", "e.safetensors", "l.pt", "e.pt"): refused(lambda: open_features(tmp_path/name), name)
    write(tmp_path/"x.npz", normal(4, 2))
    refused(lambda: open_features(f"{tmp_path/'x.npz'}:g"), "which array?", "'h' [4, 2]")


def test_M08_M11_M14_rows_that_make_no_sense_are_named(tmp_path):
    h = normal(3000, 4)
    def broken(row, value): g = h.clone(); g[row] = value; return np.save(tmp_path/"b.npy", g.numpy()) or tmp_path/"b.npy"
    for row in (0, 1500, 2999):
        refused(lambda: compare({"a": h, "b": broken(row, math.nan)}, chunk=512), "model 'b'", f"row {row}", "NaN")
        refused(lambda: compare({"a": h, "b": broken(row, 0)}, chunk=512), "model 'b'", f"row {row}", "zero")
    refused(lambda: compare({"a": h, "b": torch.ones(3000, 4)}), "model 'b'", "constant")
    refused(lambda: compare({"a": h, "b": h[:2999]}), "model 'b': 2999 rows", "'a' has 3000")
    refused(lambda: compare({"a": h}), "two models"); refused(lambda: compare({"a": h[:3], "b": h[:3]}), "needs at least 4 rows")
    for bad in (dict(level=1.0), dict(level=math.nan), dict(chunk=0), dict(dataset="digits"), dict(clusters=torch.arange(7))): refused(lambda: compare({"a": h, "b": h + 1}, **bad), next(iter(bad)))


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".pt"])
def test_M10_ids_in_another_order(tmp_path, ending):
    h, ids, perm = normal(900, 4), torch.arange(900) + 7000, torch.cat([torch.arange(700), torch.arange(700, 900).flip(0)])
    a, b, c = [write(tmp_path/f"{n}{ending}", h[i], ids=ids[i]) for n, i in (("a", slice(None)), ("b", perm), ("c", slice(None)))]
    refused(lambda: compare({"a": a, "b": b}, chunk=256), "model 'b', row 700: id 7899", "'a' has id 7700")
    assert np.allclose(compare({"a": a, "c": c}).query("metric != 'drift'").value, 1)
    assert any("not every model has ids" in n for n in compare({"a": a, "x": h + 1}).attrs["notes"])
    refused(lambda: open_features(write(tmp_path/f"d{ending}", h, ids=ids[:5])), "ids must be whole numbers [900]")


def test_ids_of_other_kinds(tmp_path):
    h = normal(30, 4).numpy()
    np.savez(tmp_path/"t.npz", h=h, ids=np.array([f"n{i}" for i in range(30)])); np.savez(tmp_path/"i.npz", h=h, ids=np.arange(30))
    np.savez(tmp_path/"s.npz", h=h, ids=np.array([f"n{i}" for i in range(29)] + ["zz"]))
    refused(lambda: compare({"t": tmp_path/"t.npz", "i": tmp_path/"i.npz"}), "model 'i': its ids are int64")
    refused(lambda: compare({"t": tmp_path/"t.npz", "s": tmp_path/"s.npz"}), "model 's', row 29: id zz")


def test_labels_add_probes_and_collapse(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "fit_linear_probe", lambda h, y: seen.append(len(h)) or fit_linear_probe(h, y, reg=0.01))  # quicker
    y = torch.arange(600) % 3
    h = 3 * torch.eye(4)[y] + normal(600, 4)
    a = write(tmp_path/"a.npz", h, y=y)
    np.save(tmp_path/"y.npy", y.numpy())
    given = compare({"a": a, "b": h + 0.1 * normal(600, 4, seed=1)}, labels=y, chunk=100)
    for labels in (True, tmp_path/"y.npy", y.numpy(), f"{a}:y", a):
        assert compare({"a": a, "b": h + 0.1 * normal(600, 4, seed=1)}, labels=labels, chunk=77).equals(given)
    own = given[given.b == ""].set_index(["a", "metric"])
    assert [m for n, m in own.index if n == "a"] == ["nccc", "linear", "knn", "cdnv", "directional_cdnv", "nc1", "effective_rank"]
    assert (own.value["a"][:3] > 0.8).all() and own.low["a"][:3].le(own.value["a"][:3]).all() and own.low["a"][3:].isna().all()
    monkeypatch.setattr(module, "PROBE_ROWS", 120)
    few = compare({"a": a, "b": h + 1}, labels=True)
    assert seen == [480] * 12 + [96] * 2
    assert any("draw of 120 of the 600 rows" in n for n in few.attrs["notes"])
    whole = compare({"a": a, "b": h + 1}).value
    assert np.array_equal(few.value[:len(whole)], whole)
    two = write(tmp_path/"two.npz", h, y=y.flip(0))
    refused(lambda: compare({"a": a, "two": two}, labels=True), "model 'two', row 0: another label")
    refused(lambda: compare({"x": h, "z": h + 1}, labels=True), "none of the models comes with labels")
    refused(lambda: compare({"x": h, "z": h + 1}, labels=y[:5]), "5 labels for 600 rows")
    refused(lambda: compare({"x": h, "z": h + 1}, labels=torch.zeros(600, dtype=torch.int64)), "two classes")
    refused(lambda: compare({"x": h, "z": h + 1}, labels=y / 2), "labels must be whole numbers")


def test_clusters_widen_the_intervals():
    c = torch.arange(300) % 20
    h = torch.eye(20)[c] + 0.3 * normal(300, 20)
    hs = {"a": h, "b": h + 0.3 * normal(300, 20, seed=1)}
    t, want = compare(hs, clusters=c, chunk=64), intervals(hs, clusters=c).query("metric in @module.PAIR_METRICS")
    assert np.allclose(t[["low", "high"]], want[["low", "high"]], rtol=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    p = Params(dataset="digits", n_train=200, size=16, encoder="resnet8", proj_hidden=16, proj_dim=8, B=50, epochs=1, warmup=0, snapshots=1)
    runs = [stored_run(dataclasses.replace(p, objective=o), tmp_path_factory.mktemp("runs")) for o in ("cl", "nscl", "ce")]
    train_runs(runs)
    return runs


def test_checkpoints(runs, tmp_path, monkeypatch, capsys):
    ds = dataset_of(runs[0].p)
    h = {r.id: torch.cat([*features(load_model(r, 4, ds), ds.test, view_spec(r.p, ds))]) for r in runs}
    table = compare({r.id: r.path for r in runs}, chunk=100)
    assert np.allclose(table.value, compare(h).value, rtol=1e-4)
    monkeypatch.chdir(tmp_path)
    command(runs[0].path, runs[1].path, "--dataset", "digits", "--split", "train", "--json", "-", "--labels")
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [r["metric"] for r in rows[:5]] == list(module.PAIR_METRICS) and rows[-1]["low"] is None and "digits train" in err
    assert {r["a"] for r in rows} == {runs[0].id, runs[1].id} and "N = 1438" in err
    starts = [r.snapshots[0] for r in runs[:2]]
    assert np.allclose(compare(dict(zip("ab", starts))).query("metric != 'drift'").value, 1, atol=1e-6)            # twins start equal
    saved = write(tmp_path/"f.npz", h[runs[0].id], ids=ds.test.ids)
    assert compare({"file": saved, "run": runs[0].path}).value[0] == pytest.approx(1, abs=1e-5)
    refused(lambda: compare({"file": saved, "run": runs[0].path}, split="train"), "model 'run': 200 rows")


def test_folders_that_are_no_runs(runs, tmp_path):
    refused(lambda: open_checkpoint(tmp_path), "not a run's folder")
    for text in ("[]", "{", '{"tua": 1}', '{"tau": "x"}'):
        (tmp_path/"params.json").write_text(text)
        refused(lambda: open_checkpoint(tmp_path), str(tmp_path))
    (tmp_path/"params.json").write_text((runs[0].path/"params.json").read_text())
    refused(lambda: open_checkpoint(tmp_path), "not been trained to its end")
    refused(lambda: open_checkpoint(runs[0].path, "textures"), "1 channels", "textures have 3")
    refused(lambda: open_checkpoint(runs[0].path, "digit"), "did you mean 'digits'"); refused(lambda: open_checkpoint(runs[0].path, split="val"), "train, test")
    (tmp_path/"snapshot-00000004-0000000000000000.safetensors").write_bytes(b"no")
    with pytest.warns(UserWarning, match="set aside"): refused(lambda: open_checkpoint(tmp_path/"snapshot-00000004-0000000000000000.safetensors"), "no usable snapshot")


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    "A folder of images of one's own, another one, and two runs on the first."
    top = tmp_path_factory.mktemp("birds")
    for k, (name, split, c, i) in enumerate((n, s, c, i) for n in ("birds", "fish") for s in ("train", "test") for c in "ab" for i in range(8)):
        (at := top/name/split/c).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.RandomState(k).randint(0, 255, (12, 12, 3), dtype=np.uint8)).save(at/f"{i}.png")
    p = Params(dataset="folder", root=str(top/"birds"), data="birds", size=12, encoder="resnet8", width=0.25, proj_hidden=16, proj_dim=8, B=8, epochs=1, warmup=0, snapshots=1)
    runs = [stored_run(dataclasses.replace(p, objective=o), top/"runs") for o in ("cl", "nscl")]
    train_runs(runs)
    return top, runs


def test_runs_on_a_folder_of_ones_own_are_compared_where_root_says_that_it_lies(birds, tmp_path, monkeypatch, capsys):
    top, runs = birds
    monkeypatch.chdir(tmp_path)
    ds = dataset_of(runs[0].p)
    want = compare({r.id: torch.cat([*features(load_model(r, 2, ds), ds.test, view_spec(r.p, ds))]) for r in runs})
    command(runs[0].path, runs[1].path, "--root", top/"birds", "--device", "cpu", "--json", "-")
    assert np.allclose([r["value"] for r in json.loads(capsys.readouterr().out)], want.value, rtol=1e-4)
    refused(lambda: command(runs[0].path, runs[1].path), runs[0].id, "found no train/ and test/", "--root FOLDER")
    refused(lambda: command(runs[0].path, runs[1].path, "--root", top/"fish"), "trained on other data")             # whose folders have the same names
    command(runs[0].path, runs[1].path, "--root", top/"fish", "--dataset", "folder", "--data", "fish", "--labels", "--json", "-")
    assert "fish test, classes [0, 1]" in capsys.readouterr().err
    refused(lambda: compare({"a": runs[0].path, "b": runs[1].path}, data="fish"), "name one of them as dataset"); refused(lambda: compare({"a": normal(50, 3), "b": normal(50, 3)}, root="x"), "root: only checkpoints")
    refused(lambda: open_checkpoint(runs[0].path, root=str(top/"birds"), device="gpu"), "auto, cpu, cuda")


def test_a_run_with_an_objective_of_ones_own_is_compared(tmp_path):
    "In a process that has not seen the plugin yet."
    (plugin := tmp_path/"mine.py").write_text("from cl_nscl.losses import Objective, cl_loss, register\nregister(Objective('mine46', lambda z, y, tau, pairs: cl_loss(z, y, tau, pairs=pairs), False, False, 'Mine'))\n")
    settings = ["--preset", "smoke", "--objective", "mine46", "cl", "--set", "steps=1", "epochs=1", "snapshots=1", "width=0.25", f"plugins=[{plugin}]", f"runs={tmp_path/'runs'}"]
    call = lambda *argv: subprocess.run([sys.executable, "-m", "cl_nscl.run", *map(str, argv)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    lines = call("train", "digits", *settings).stdout.splitlines()
    done = call("compare", *(line.split()[2] for line in lines), "--json", "rows.json")
    assert len(lines) == 2 and done.returncode == 0, done.stderr
    assert {r["metric"] for r in json.loads((tmp_path/"rows.json").read_text())} == set(module.PAIR_METRICS)


def test_the_command_writes_table_chart_and_rows(tmp_path, capsys):
    h = normal(60, 10)
    a, b = write(tmp_path/"a.npy", h), write(tmp_path/"b.pt", h + normal(60, 10, seed=1))
    command(a, b, "--json", tmp_path/"rows.json", "--out", tmp_path/"out", "--level", "0.9")
    rows = json.loads((tmp_path/"rows.json").read_text())
    assert all(list(r) == ["a", "b", "metric", "value", "low", "high", "N", "d_a", "d_b"] and r["N"] == 60 and r["low"] <= r["value"] <= r["high"] for r in rows)
    assert {(r["a"], r["b"]) for r in rows} == {("a", "b")} and [r["metric"] for r in rows] == list(module.PAIR_METRICS)
    assert sorted(p.name for p in (tmp_path/"out").iterdir()) == ["cka.json", "cka.png", "cka.svg", "table.csv"]
    said = capsys.readouterr().out
    assert "a: N = 60, d = 10" in said and "read cka_debiased" in said
    refused(lambda: command(a), "two models"); refused(lambda: command(a, a), "named twice")


REFERENCE = {".npy": lambda p: np.load(p, allow_pickle=False), ".npz": lambda p: np.load(p, allow_pickle=False)["h"],
             ".safetensors": lambda p: load_file(p)["h"], ".pt": lambda p: torch.load(p, weights_only=True)["h"]}
fuzz = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("ending", FORMATS)
@given(data=st.binary(max_size=400), start=st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"PK\x03\x04", b"\x08\0\0\0\0\0\0\0", b"\x80\x02"]))
@fuzz
def test_any_bytes_are_refused(tmp_path, ending, data, start):
    path = tmp_path/f"f{ending}"
    path.write_bytes(start + data)
    refused(lambda: read(path), str(path))


@pytest.mark.parametrize("ending", FORMATS)
@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
@fuzz
def test_changed_bytes_are_refused_or_read_as_the_format_says(tmp_path, ending, flips):
    path = write(tmp_path/f"f{ending}", normal(30, 4))
    raw = bytearray(path.read_bytes())
    for at, value in flips: raw[int(at * len(raw))] = value
    path.write_bytes(raw)
    try: got = read(path)
    except UserError: return refused(lambda: read(path), str(path))
    try: want = REFERENCE[ending](path)
    except Exception: return                                          # read here although the format's own reader is stricter
    assert np.array_equal(got.double().numpy(), np.asarray(want, dtype=np.float64), equal_nan=True)


DTYPES = ["f2", "f4", "f8", ">f4", "i1", "i8", "u2", "?", "c8", "O", "U3", "S3", "M8[s]", "m8[s]", "V4", "f4,i4"]


@given(dtype=st.sampled_from(DTYPES), shape=st.lists(st.integers(0, 5), max_size=4).map(tuple), order=st.sampled_from("CF"), ending=st.sampled_from([".npy", ".npz"]), key=st.sampled_from(["h", "features", "x", "../x", "ids"]))
@fuzz
def test_any_type_and_shape_is_read_or_refused_by_name(tmp_path, dtype, shape, order, ending, key):
    a, path = np.zeros(shape, dtype, order), tmp_path/f"f{ending}"
    np.save(path, a, allow_pickle=True) if ending == ".npy" else np.savez(path, **{key: a})
    good = a.dtype.kind in "fiu" and a.ndim == 2 and a.size
    if not good: return refused(lambda: read(path), str(path))
    try: assert np.array_equal(read(path).double().numpy(), a.astype(float))
    except UserError as e: assert ending == ".npz" and order == "F" and "column by column" in str(e)
