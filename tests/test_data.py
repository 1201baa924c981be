"""Data: splits, subsets, sources, batches."""
import gzip, math
from pathlib import Path

import pytest, torch
from hypothesis import given, settings, strategies as st

from cl_nscl import data
from cl_nscl.core import UserError
from cl_nscl.data import DATASETS, Source, batches, epoch_order, equal_counts, load_dataset, loader, stratified_batches, texture_letters

torch.set_num_threads(1)
same = lambda a, b: a.x.equal(b.x) and a.y.equal(b.y) and a.ids.equal(b.ids)


def test_E05_classes_are_relabelled_in_the_order_asked_for_and_the_rest_is_counted():
    every, ds = load_dataset("digits"), load_dataset("digits", classes=(7, 2))
    assert ds.C == 2 and ds.class_ids == (7, 2) and ds.class_names == ("7", "2")
    for part in ("train", "test"):
        a, b = getattr(ds, part), getattr(every, part)
        assert set(a.y.tolist()) == {0, 1}
        at = torch.isin(b.y, torch.tensor([7, 2]))
        assert a.ids.equal(b.ids[at]) and a.x.equal(b.x[at]) and ds.original(a.y).equal(b.y[at])
        assert not torch.isin(a.ids, b.ids[b.y == 5]).any()
    out = sum(int((s.y != 7).sum() - (s.y == 2).sum()) for s in (every.train, every.test))
    assert ds.excluded == out and every.excluded == 0


def test_D09_targets_of_a_subset_are_0_to_C_minus_1_and_map_back():
    for name, classes in (("digits", (7, 2)), ("textures", (999, 0, 500))):
        ds = load_dataset(name, classes=classes, n_train=30)
        assert ds.train.y.unique().tolist() == ds.test.y.unique().tolist() == list(range(ds.C))
        assert ds.original(torch.arange(ds.C)).tolist() == list(classes)


@pytest.mark.parametrize("y", [-1, 2, [0, 1, 2]])
def test_E05_a_label_that_no_class_has_is_refused(y):
    "-1 would be the last class."
    with pytest.raises(ValueError, match=r"y: labels must be in 0..1, not from"): load_dataset("digits", classes=(7, 2)).original(torch.tensor(y))


@pytest.mark.parametrize("classes, says", [((7, 7), "twice"), ((3, 12), "12 is no class; valid ids: 0 to 9"), ((-1,), "-1 is no class"),
                                           ((True, 2), "True is no class"), ((7.0, 2), "7.0 is no class")])
def test_bad_classes_are_refused_in_one_line(classes, says):
    with pytest.raises(UserError, match=says) as e: load_dataset("digits", classes=classes)
    assert "\n" not in str(e.value)


def test_digits_are_bit_equal_at_every_load_and_touch_no_global_generator():
    state = torch.get_rng_state()
    a, b = load_dataset("digits"), load_dataset("digits", seed=5)
    assert same(a.train, b.train) and same(a.test, b.test)                       # one split for all seeds
    load_dataset("textures", classes=(1, 2), n_train=10); load_dataset("digits", n_train=50, seed=3)
    for _ in loader(a.train, batches(0, 0, len(a.train), 500)): pass
    stratified_batches(0, 0, a.train.y, 100)
    assert torch.get_rng_state().equal(state)


def test_split_of_digits_is_disjoint_complete_and_stratified():
    ds = load_dataset("digits")
    assert torch.cat([ds.train.ids, ds.test.ids]).sort().values.equal(torch.arange(1797))
    n, m = ds.train.y.bincount(), ds.test.y.bincount()
    assert ((m - (n + m) / 5).abs() <= 0.5).all()
    assert not any(torch.equal(ds.test.x[0], x) for x in ds.train.x)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_equal_counts_are_exact_and_as_equal_as_possible(have, draw):
    n = draw.draw(st.integers(len(have), sum(have)))
    take = equal_counts(have, n)
    assert sum(take) == n and all(0 < t <= h for t, h in zip(take, have))
    free = [t for t, h in zip(take, have) if t < h]                              # classes that could still give
    assert not free or (max(free) - min(free) <= 1 and max(take) <= min(free) + 1)


def test_subset_follows_the_seed_and_a_larger_one_contains_the_smaller_one():
    a, b, c = (load_dataset("digits", n_train=n, seed=s).train for n, s in ((100, 0), (100, 0), (100, 1)))
    assert same(a, b) and not a.ids.equal(c.ids) and len(a) == 100 and a.y.bincount().tolist() == [10] * 10
    assert set(a.ids.tolist()) <= set(load_dataset("digits", n_train=400).train.ids.tolist())
    with pytest.raises(UserError, match="n_train = 1439"): load_dataset("digits", n_train=1439)
    with pytest.raises(UserError, match="n_train = 5"): load_dataset("digits", n_train=5)


def test_texture_images_do_not_depend_on_the_other_classes_nor_on_the_call():
    a, b = load_dataset("textures", classes=(3, 998)), load_dataset("textures", classes=(998, 5, 3))
    for part in ("train", "test"):
        s, t = getattr(a, part), getattr(b, part)
        for c, (i, j) in {3: (0, 2), 998: (1, 0)}.items():
            assert s.x[s.y == i].equal(t.x[t.y == j]) and s.ids[s.y == i].equal(t.ids[t.y == j])
    small = load_dataset("textures", classes=(3, 998), n_train=7).train
    at = torch.searchsorted(a.train.ids, small.ids)
    assert a.train.ids[at].equal(small.ids) and a.train.x[at].equal(small.x)
    assert same(a.train, load_dataset("textures", classes=(3, 998)).train)


def test_textures_have_a_thousand_classes_and_no_repeated_image():
    x = (src := DATASETS["textures"]("")).pixels(torch.arange(0, 1_100_000, 1100))           # the first image of each class
    assert len(src.class_ids) == 1000 and len(x.flatten(1).unique(dim=0)) == 1000
    assert len({tuple(w) for w in texture_letters().tolist()}) == 1000
    assert len(load_dataset("textures", n_train=40).class_ids) == 20
    shared = torch.tensor([len(set(a) & set(b)) for a in texture_letters()[:40].tolist() for b in texture_letters()[40:80].tolist()])
    assert set(shared.tolist()) == {0, 1, 2}                                     # near and far classes


def test_another_loader_gets_subset_resize_and_labels_for_nothing(monkeypatch):
    asked = []
    def folder(root):
        def pixels(ids): asked.extend(ids.tolist()); return (torch.full((3, 5 + i, 9), i, dtype=torch.uint8) for i in ids.tolist())
        return Source((torch.tensor([30, 10, 30, 20]), torch.arange(4)), (torch.tensor([10, 30]), torch.arange(4, 6)), pixels, (10, 20, 30), ("a", "b", "c"), (0.5,) * 3, (0.5,) * 3)
    monkeypatch.setitem(DATASETS, "folder", folder)
    ds = load_dataset("folder", classes=(30, 10), size=4)
    assert ds.train.x.shape == (3, 3, 4, 4) and ds.train.x[:, 0, 0, 0].tolist() == [0, 1, 2] and ds.train.y.tolist() == [0, 1, 0]
    assert ds.excluded == 1 and ds.class_names == ("c", "a") and 3 not in asked   # pixels of excluded rows are never read
    with pytest.raises(UserError, match=r"class 20 \(b\) has no test sample"): load_dataset("folder", size=4)


def write_fashion(folder: Path, cut=0):
    for n, shape in zip(data.IDX_FILES, [(20, 28, 28), (20,), (10, 28, 28), (10,)]):
        size = torch.tensor(shape).prod().item()
        raw = bytes([0, 0, 8, len(shape)]) + b"".join(k.to_bytes(4, "big") for k in shape) + bytes(i % 10 for i in range(size))
        (folder/f"{n}.gz").write_bytes(gzip.compress(raw[:len(raw) - cut]))


def test_fashion_mnist_is_found_in_root_cache_or_debian_folder_or_named_as_missing(tmp_path, monkeypatch):
    for d in ("cache", "debian", "mine"): (tmp_path/d).mkdir()
    monkeypatch.setenv("CL_NSCL_DATA", str(tmp_path/"cache")); monkeypatch.setattr(data, "DEBIAN", tmp_path/"debian")
    def offline(*a, **k): raise RuntimeError("no route\nto host")
    monkeypatch.setattr(data, "FashionMNIST", type("F", (data.FashionMNIST,), {"__init__": offline}))
    with pytest.raises(UserError) as e: load_dataset("fashion_mnist")
    for word in (str(tmp_path/"cache"), str(tmp_path/"debian"), "no route to host", "train-images-idx3-ubyte.gz", "root", "dataset-fashion-mnist"): assert word in str(e.value)
    assert "\n" not in str(e.value)
    for folder, root in (("debian", ""), ("cache", ""), ("mine", str(tmp_path/"mine"))):
        write_fashion(tmp_path/folder)
        ds = load_dataset("fashion_mnist", root=root)
        assert (len(ds.train), len(ds.test), ds.channels, ds.size) == (20, 10, 1, 28) and not set(ds.train.ids.tolist()) & set(ds.test.ids.tolist())
        before = ds.fingerprint
    other = gzip.decompress((f := tmp_path/"mine"/f"{data.IDX_FILES[0]}.gz").read_bytes())[:-1] + b"\xff"
    f.write_bytes(gzip.compress(other))                                      # one pixel
    assert load_dataset("fashion_mnist", root=str(tmp_path/"mine")).fingerprint != before
    write_fashion(tmp_path/"mine", cut=3)
    with pytest.raises(UserError, match="not a whole idx file"): load_dataset("fashion_mnist", root=str(tmp_path/"mine"))


@pytest.mark.skipif(data.find_idx([data.DEBIAN]) is None, reason="Debian's package dataset-fashion-mnist is not installed")
def test_fashion_mnist_of_debian_is_the_published_one():
    ds = load_dataset("fashion_mnist", root=str(data.DEBIAN))
    assert (len(ds.train), len(ds.test)) == (60000, 10000) and ds.train.y.bincount().tolist() == [6000] * 10
    assert ds.fingerprint == "4cc1512e408a123a"                              # that of runs whose record did not cover pixels yet
    x = ds.train.x.double() / 255
    assert abs(x.mean() - ds.mean[0]) < 1e-4 and abs(x.std() - ds.std[0]) < 1e-4


def test_other_data_in_files_of_the_same_names_and_shapes_are_not_taken_for_fashion_mnist(tmp_path):
    "MNIST itself, for example."
    for n, shape in zip(data.IDX_FILES, [(60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,)]):
        (tmp_path/n).write_bytes(bytes([0, 0, 8, len(shape)]) + b"".join(k.to_bytes(4, "big") for k in shape) + bytes(math.prod(shape)))
    with pytest.raises(UserError, match="train-images-idx3-ubyte: is not the published file of Fashion-MNIST"): load_dataset("fashion_mnist", root=str(tmp_path))


def test_R11_the_order_changes_with_the_epoch_and_with_the_seed():
    orders = {tuple(epoch_order(s, e, 50).tolist()) for s in range(3) for e in range(4)}
    assert len(orders) == 12 and all(sorted(o) == list(range(50)) for o in orders)
    assert epoch_order(1, 2, 50).equal(epoch_order(1, 2, 50))
    y = torch.arange(50) % 5
    assert len({tuple(stratified_batches(s, e, y, 10).flatten().tolist()) for s in range(3) for e in range(4)}) == 12


def test_L16_the_ragged_batch_is_dropped_and_others_are_dropped_in_the_next_epoch():
    N, B = 2 * 4 + 1, 4                                                          # 2B + 1 images
    b = [batches(0, e, N, B) for e in range(20)]
    assert all(i.shape == (2, 4) and len(i.unique()) == 8 for i in b)
    assert len({(set(range(N)) - set(i.flatten().tolist())).pop() for i in b}) > 4
    with pytest.raises(UserError, match="B = 10: .*N = 9"): batches(0, 0, N, 10)


def test_D13_stratified_batches_have_a_known_composition():
    y = (torch.arange(5000) * 7) % 10
    b = stratified_batches(0, 0, y, 100)
    assert b.shape == (50, 100) and b.flatten().sort().values.equal(torch.arange(5000))
    assert all(y[i].bincount().tolist() == [10] * 10 for i in b)
    y = (torch.arange(1000) % 10 == 0).long()                                    # 90 : 10
    b = stratified_batches(0, 0, y, 10)
    assert (y[b].sum(1) == 1).all() and len(b.unique()) == 1000
    with pytest.raises(UserError, match="class 0 fills"): stratified_batches(0, 0, y, 5)
    with pytest.raises(UserError, match="class 0 fills"): stratified_batches(0, 0, torch.zeros(100, dtype=torch.int64), 10)
    with pytest.raises(UserError, match="B = 101"): stratified_batches(0, 0, torch.arange(100) % 2, 101)


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 12), st.integers(30, 400), st.integers(3, 30), st.integers(0, 99))
def test_D13_stratified_batches_of_any_shape_use_each_sample_once_and_stay_close(C, N, B, seed):
    y = torch.arange(N) % C
    b = stratified_batches(seed, 0, y, B)
    assert len(b.unique()) == b.numel() == N // B * B
    counts = torch.stack([y[i].bincount(minlength=C) for i in b])
    assert ((counts - B * y.bincount() / N).abs() < 2).all()


def test_R09_loader_gives_the_same_batches_for_any_number_of_workers():
    s = load_dataset("digits", n_train=200).train
    rows = batches(0, 1, 200, 30)
    runs = [list(loader(s, rows, workers)) for workers in (0, 1, 2)]
    assert [len(r) for r in runs] == [6] * 3
    for got in zip(*runs):
        for part in zip(*got): assert part[0].equal(part[1]) and part[0].equal(part[2])
    assert torch.cat([i for i, _, _ in runs[0]]).equal(rows.flatten())
