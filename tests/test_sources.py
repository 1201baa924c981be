"Sources: every real format on the disk, small, through the code that users run; what is missing, damaged or mistaken is said in one line."
import importlib.util, io, json, os, pickle, socket, subprocess, sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from conftest import need
from cl_nscl import sources
from cl_nscl.core import Params, UserError, run_id
from cl_nscl.data import MissingData, Split, Stream, data_record, fingerprint, load_dataset, open_source
from cl_nscl.images import decode
from cl_nscl.measure import load_model
from cl_nscl.store import stored_run, train_runs
from cl_nscl.twins import Twins, dataset_of, features, train, twin_batch
from cl_nscl.views import eval_view, split_views, uniforms, view_boxes, view_spec

os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
need("hub", "" if importlib.util.find_spec("datasets") else "the extra hub is not installed")
import datasets
torch.set_num_threads(1)
pixels = lambda seed, w=12, h=10: np.random.RandomState(seed).randint(0, 256, (h, w, 3), dtype=np.uint8)


def picture(path, seed=0, size=(12, 10), mode="RGB", **how):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, *size)).convert(mode).save(path, **how)

def encoded(im, kind="PNG"):
    im.save(b := io.BytesIO(), kind)
    return b.getvalue()

def tree(root, classes=("a", "b"), n=6, m=3, size=(12, 10), test="test", ending="png"):
    for k, c in enumerate(classes):
        for split, count, first in (("train", n, 0), (test, m, 500)):
            for i in range(count): picture(f"{root}/{split}/{c}/{i}.{ending}", first + 100 * k + i, size)
    return str(root)

@pytest.fixture
def offline(monkeypatch, tmp_path):
    "No network: every connection and every look-up of a name fails at once."
    connect = socket.socket.connect
    def refused(*a, **k): raise OSError("the network is blocked")
    monkeypatch.setattr(socket.socket, "connect", lambda self, to: connect(self, to) if self.family == socket.AF_UNIX else refused()) # workers talk through those
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setenv("CL_NSCL_DATA", str(tmp_path/"cache"))


# CIFAR: the publisher's pickles

def cifar(root, kind, monkeypatch, n=20, coarse=sources.COARSE):
    "Pickles in the publisher's layout, and their checksums in the place of the published ones."
    folder = Path(root)/kind.base_folder
    folder.mkdir(parents=True)
    def write(name, content):
        (folder/name).write_bytes(pickle.dumps(content))
        return [name, sources._md5(folder/name)]
    def batch(seed, C):
        y = [(7 * i + seed) % C for i in range(n)]
        x = np.random.RandomState(seed).randint(0, 256, (n, 3072), dtype=np.uint8)
        return dict(data=x, labels=y) if C == 10 else dict(data=x, fine_labels=y, coarse_labels=[coarse[i] for i in y])
    if kind is CIFAR10:
        train, test = [write(f"data_batch_{k}", batch(k, 10)) for k in range(1, 6)], [write("test_batch", batch(0, 10))]
        name, md5 = write("batches.meta", dict(label_names=[f"c{i}" for i in range(10)]))
    else:
        train, test = [write("train", batch(1, 100))], [write("test", batch(1, 100))]
        name, md5 = write("meta", dict(fine_label_names=[f"fine{i}" for i in range(100)], coarse_label_names=[f"coarse{i}" for i in range(20)]))
    for k, v in dict(train_list=train, test_list=test, meta=dict(kind.meta, filename=name, md5=md5)).items(): monkeypatch.setattr(kind, k, v)
    return folder


def test_cifar10_is_read_from_the_publishers_pickles(tmp_path, monkeypatch):
    folder = cifar(tmp_path, CIFAR10, monkeypatch)
    for root in (tmp_path, folder):
        ds = load_dataset("cifar10", root=str(root))
        assert (len(ds.train), len(ds.test), ds.C, ds.channels, ds.size) == (100, 20, 10, 3, 32) and ds.class_names[3] == "c3"
    raw = pickle.loads((folder/"data_batch_1").read_bytes())
    assert ds.train.x[:20].flatten(1).numpy().tolist() == raw["data"].tolist() and ds.train.y[:20].tolist() == raw["labels"]
    assert not set(ds.train.ids.tolist()) & set(ds.test.ids.tolist())
    part = load_dataset("cifar10", root=str(tmp_path), classes=(7, 2))
    assert part.excluded == 120 - len(part.train) - len(part.test) and part.class_names == ("c7", "c2") and set(part.train.y.tolist()) == {0, 1}  # E05


def test_a_cifar_file_that_is_not_the_published_one_is_named_and_not_unpickled(tmp_path, monkeypatch):
    folder = cifar(tmp_path, CIFAR10, monkeypatch)
    class Harm:
        def __reduce__(self): return os.mkdir, (str(tmp_path/"harm"),)
    (folder/"data_batch_3").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(UserError, match="data_batch_3: is not the published file"): load_dataset("cifar10", root=str(tmp_path))
    assert not (tmp_path/"harm").exists()
    (folder/"data_batch_3").unlink()
    with pytest.raises(UserError, match="data_batch_3: is missing; unpack"): load_dataset("cifar10", root=str(tmp_path))


def test_cifar_is_unpacked_from_an_archive_in_root_without_a_network(tmp_path, monkeypatch, offline):
    import tarfile
    folder = cifar(tmp_path/"made", CIFAR10, monkeypatch)
    (tmp_path/"mine").mkdir()
    with tarfile.open(packed := tmp_path/"mine"/CIFAR10.filename, "w:gz") as t: t.add(folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", sources._md5(packed))
    assert len(load_dataset("cifar10", root=str(tmp_path/"mine")).train) == 100


def test_D07_cifar100_is_fine_by_default_and_coarse_on_request(tmp_path, monkeypatch):
    cifar(tmp_path, CIFAR100, monkeypatch, n=100)
    fine, coarse = (open_source("cifar100", str(tmp_path), labels=k) for k in ("", "coarse"))
    assert (len(fine.class_ids), len(coarse.class_ids), fine.class_names[5], coarse.class_names[5]) == (100, 20, "fine5", "coarse5")
    of = dict(zip(fine.train[0].tolist(), coarse.train[0].tolist()))
    assert [of[i] for i in (0, 1, 2, 99)] == [4, 1, 14, 13] and sorted(of.values()) == sorted([*range(20)] * 5)
    assert load_dataset("cifar100", root=str(tmp_path), labels="coarse").C == 20
    with pytest.raises(UserError, match="has fine .the default. and coarse"): open_source("cifar100", str(tmp_path), labels="rough")
    assert run_id(Params(dataset="cifar100")) != run_id(Params(dataset="cifar100", labels="coarse"))


def test_D07_a_wrong_coarse_table_in_the_file_is_refused(tmp_path, monkeypatch):
    cifar(tmp_path, CIFAR100, monkeypatch, n=100, coarse=sources.COARSE[1:] + sources.COARSE[:1])
    with pytest.raises(UserError, match="coarse labels do not follow from the fine ones"): open_source("cifar100", str(tmp_path), labels="coarse")


# Tiny-ImageNet, Mini-ImageNet, ImageNet-1K: the archives' own layouts

def tiny(base, size=(64, 64)):
    for i, c in enumerate(["n03", "n01", "n02"]):
        for j in range(2): picture(base/f"train/{c}/images/{c}_{j}.JPEG", 10 * i + j, size)
        (base/f"train/{c}/{c}_boxes.txt").write_text("x\n")
    for i in range(4): picture(base/f"val/images/val_{i}.JPEG", 90 + i, size)
    (base/"val/val_annotations.txt").write_text("".join(f"val_{i}.JPEG\t{c}\t0\t0\t62\t62\n" for i, c in enumerate(["n03", "n01", "n02", "n03"])))
    (base/"test/images").mkdir(parents=True)
    return base


def test_D01_tiny_imagenets_test_labels_come_from_its_text_file(tmp_path):
    tiny(tmp_path/"tiny-imagenet-200")
    for root in (tmp_path, tmp_path/"tiny-imagenet-200"):
        src = open_source("tiny_imagenet", str(root))
        assert src.class_names == ("n01", "n02", "n03") and src.test[0].tolist() == [2, 0, 1, 2] and src.train[0].tolist() == [0, 0, 1, 1, 2, 2]
    ds = load_dataset("tiny_imagenet", root=str(tmp_path), size=64)
    assert isinstance(ds.train, Split) and ds.train.x.shape == (6, 3, 64, 64)
    assert ds.test.x[1].permute(1, 2, 0).numpy().tolist() == np.asarray(Image.open(tmp_path/"tiny-imagenet-200/val/images/val_1.JPEG")).tolist()
    (tmp_path/"tiny-imagenet-200/val/images/val_2.JPEG").unlink()
    with pytest.raises(UserError, match="val_2.JPEG: is missing; 1 of 4 images"): open_source("tiny_imagenet", str(tmp_path))


@pytest.mark.parametrize("classes, printed", [([], True), ([0, 1], False)])
def test_the_papers_accuracies_stand_beside_all_classes_and_not_beside_some(tmp_path, classes, printed):
    tiny(tmp_path/"tiny-imagenet-200", (16, 16))
    args = [sys.executable, "-m", "cl_nscl.run", "reproduce", "tiny_imagenet", "--preset", "smoke", "--experiment", "05_downstream", "--jobs", "1",
            "--set", f"root={tmp_path}", "size=16", "n_train=0", "B=4", "epochs=1", "snapshots=1", "objectives=[scl, ce]", f"classes={classes}"]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert ("(paper)" in (tmp_path/"results/tiny_imagenet/table1.csv").read_text()) == printed
    assert ("the paper's value" in (tmp_path/"results/tiny_imagenet/table1_chart.json").read_text()) == printed


@pytest.mark.parametrize("text, says", [
    ("val_0.JPEG n01 0 0\nval_1.JPEG n01 0 0\n", "val_annotations.txt, line 1: must hold class and file, separated by"), ("", "val_annotations.txt: is empty"),
    (b"val_0.JPEG\tn\xff1\n", "val_annotations.txt: cannot be read as a table"), ("val_0.JPEG\tn01\nval_0.JPEG\tn02\n", "val_0.JPEG is named twice, as n01 and as n02"),
    ("val_7.JPEG\tn01\n", "val_7.JPEG: is missing")])
def test_D01_annotations_that_cannot_be_meant_are_named(tmp_path, text, says):
    file = tiny(tmp_path/"tiny-imagenet-200")/"val/val_annotations.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=says) as e: open_source("tiny_imagenet", str(tmp_path))
    assert "\n" not in str(e.value)


def test_D01_images_without_a_line_are_counted(tmp_path):
    base = tiny(tmp_path/"tiny-imagenet-200")
    before = open_source("tiny_imagenet", str(tmp_path)).found["left_out"]
    for i in (7, 8): picture(base/f"val/images/val_{i}.JPEG", i, (64, 64))
    src = open_source("tiny_imagenet", str(tmp_path))
    assert (len(src.test[0]), src.found["left_out"]) == (4, before + 2)


def test_D03_images_beside_the_class_folders_are_counted_and_dead_links_named(tmp_path):
    tree(tmp_path)
    picture(tmp_path/"train/stray.png")
    assert open_source("folder", str(tmp_path)).found["left_out"] == 1
    (tmp_path/"train/a/gone.png").symlink_to(tmp_path/"nowhere.png")
    with pytest.raises(UserError, match="train/a/gone.png: cannot be read .* a link to a file that is gone"): open_source("folder", str(tmp_path))


def test_D03_hidden_folders_and_files_are_no_classes_and_no_images(tmp_path):
    tree(tmp_path, ("n01", "n02", "n03"))
    for name in (".ipynb_checkpoints/x.png", "n01/.ipynb_checkpoints/x.png", "n01/._0.png"): picture(tmp_path/"train"/name)
    (tmp_path/"train/n01/Thumbs.db").write_bytes(b"0")
    src = open_source("folder", str(tmp_path))
    assert src.class_names == ("n01", "n02", "n03") and src.train[0].bincount().tolist() == [6] * 3 and src.found["left_out"] == 2


def test_D05_a_truncated_file_is_named_with_its_index_in_memory_and_in_a_stream(tmp_path):
    from PIL import ImageFile
    tree(tmp_path, n=3, ending="jpg", size=(80, 70))
    path = tmp_path/"train/b/1.jpg"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    switch, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, True       # somebody else's global switch changes nothing
    try:
        with pytest.raises(UserError, match=r"train/b/1.jpg \(image 4\): cut off, damaged or no image \("): load_dataset("folder", root=str(tmp_path), size=16)
        st = replace(load_dataset("imagenet1k", root=str(tmp_path), size=96).train)
        for workers in (0, 1):
            with pytest.raises(UserError, match=r"train/b/1.jpg \(image 4\): cut off") as e: [*replace(st, workers=workers).images()]
            assert "\n" not in str(e.value)
    finally: ImageFile.LOAD_TRUNCATED_IMAGES = switch


@pytest.mark.parametrize("layout", ["csv", "folders"])
def test_D06_mini_imagenets_disjoint_split_is_made_anew_within_all_classes(tmp_path, layout):
    for s, labels in dict(train=["n1", "n2"], val=["n3"], test=["n4"]).items():
        for k, c in enumerate(labels):
            for i in range(12): picture(tmp_path/("images" if layout == "csv" else f"{s}/{c}")/f"{c}{i:02}.jpg", 100 * k + i, (20, 20))
        if layout == "csv": (tmp_path/f"{s}.csv").write_text("filename,label\n" + "".join(f"{c}{i:02}.jpg,{c}\n" for c in labels for i in range(12)))
    a, b = (open_source("mini_imagenet", str(tmp_path)) for _ in range(2))
    assert a.class_names == ("n1", "n2", "n3", "n4") and a.train[0].bincount().tolist() == [10] * 4 and a.test[0].bincount().tolist() == [2] * 4
    assert fingerprint(a) == fingerprint(b)                                               # the same split for everyone
    if layout == "folders":
        with pytest.raises(UserError, match="folder: training and test have disjoint classes"): open_source("folder", str(tmp_path))


@pytest.mark.parametrize("change, says", [
    ("copied", "n1_0.jpg is named twice, as n1 and as n1"), ("relabelled", "n1_0.jpg is named twice, as n1 and as n2"), ("alone", "val.csv: cannot be read as a table"),
    ("header", "train.csv, line 2: must hold label and filename, separated by ','; it holds a, b"), ("empty", "test.csv: is empty")])
def test_D06_lists_that_name_an_image_twice_or_lack_classes_are_refused(tmp_path, change, says):
    "The same rows in two files: every test image would be a training image."
    for c in ("n1", "n2", "n3"):
        for i in range(6): picture(tmp_path/f"images/{c}_{i}.jpg", i, (20, 20))
    rows = {s: [f"{c}_{i}.jpg,{c}" for i in range(6)] for s, c in (("train", "n1"), ("val", "n2"), ("test", "n3"))}
    if change == "copied": rows["val"] = rows["train"]
    if change == "relabelled": rows["val"].append("n1_0.jpg,n2")
    if change == "empty": rows["test"] = []
    for s in ("train",) if change == "alone" else rows: (tmp_path/f"{s}.csv").write_text("\n".join(["a,b" if change == "header" else "filename,label", *rows[s]]) + "\n")
    with pytest.raises(UserError, match=says): open_source("mini_imagenet", str(tmp_path))


def test_D06_kaggles_table_is_checked_too(tmp_path):
    base = tmp_path/"ILSVRC/Data/CLS-LOC"
    for c in ("n01", "n02"): picture(base/f"train/{c}/{c}_0.JPEG", 1, (40, 30)); picture(base/f"val/v_{c}.JPEG", 2, (40, 30))
    for text, says in (("a,b\nv_n01,n01 1 2\n", "line 2: must hold PredictionString and ImageId"), ("ImageId,PredictionString\nv_n01,n01 1\nv_n01,n02 1\n", "v_n01 is named twice"),
                       ("ImageId,PredictionString\nv_n01, \n", "line 2: must hold"), ("ImageId,PredictionString\nv_n01,n01 1\n", "has no class for val/v_n02")):
        (tmp_path/"LOC_val_solution.csv").write_text(text)
        with pytest.raises(UserError, match=says): open_source("imagenet1k", str(tmp_path))


def test_imagenet_of_folders_and_of_kaggle_agree(tmp_path):
    usual, kaggle = tmp_path/"usual", tmp_path/"kaggle"
    rows = ["ImageId,PredictionString"]
    for k, c in enumerate(["n02", "n01"]):
        for i in range(2):
            for base in (usual, kaggle/"ILSVRC/Data/CLS-LOC"): picture(base/f"train/{c}/{c}_{i}.JPEG", 10 * k + i, (40, 30))
            name = f"ILSVRC2012_val_{2 * k + i:08}"
            picture(usual/f"val/{c}/{name}.JPEG", 50 + 10 * k + i, (30, 50)); picture(kaggle/f"ILSVRC/Data/CLS-LOC/val/{name}.JPEG", 50 + 10 * k + i, (30, 50))
            rows.append(f"{name},{c} 1 2 3 4")
    with pytest.raises(UserError, match="neither class folders nor a LOC_val_solution.csv"): open_source("imagenet1k", str(kaggle))
    (kaggle/"LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    a, b = (load_dataset("imagenet1k", root=str(r), size=96) for r in (usual, kaggle))
    assert isinstance(a.train, Stream) and a.class_names == b.class_names == ("n01", "n02") and a.train.y.equal(b.train.y)
    of = lambda ds: {(int(y), x.sum().item()) for y, x in zip(ds.test.y, torch.cat([*ds.test.images()]))}
    assert of(a) == of(b) and len(of(a)) == 4


# Folders of any images

def test_files_of_every_kind_become_8_bit_pixels(tmp_path):
    tree(tmp_path, n=2)
    for mode, name in (("L", "grey.png"), ("CMYK", "print.jpg"), ("P", "palette.png"), ("1", "bits.png"), ("LA", "alpha.png"), ("RGBA", "clear.png"), ("RGB", "photo.webp"), ("P", "film.gif")):
        picture(tmp_path/"train/a"/name, 7, mode=mode)
    grey = np.asarray(Image.fromarray(pixels(7)).convert("L"))
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path/"train/a/deep.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path/"train/a/deep.tif")
    p = Image.fromarray(pixels(7)).convert("P"); p.info["transparency"] = bytes(range(256)); p.save(tmp_path/"train/a/clear palette.png")
    src = open_source("folder", str(tmp_path))
    assert src.channels == 3 and len(src.train[0]) == 15
    names = [Path(n).name for n in src.opened.paths]
    x = dict(zip(names, src.pixels(torch.arange(15))))
    for name in ("grey.png", "deep.png", "deep.tif", "alpha.png"): assert x[name].numpy().tolist() == [grey.tolist()] * 3, name
    assert x["clear.png"].permute(1, 2, 0).numpy().tolist() == pixels(7).tolist()
    assert x["palette.png"].equal(x["clear palette.png"])
    assert set(x["bits.png"].flatten().tolist()) == {0, 255}
    assert (x["print.jpg"].permute(1, 2, 0).int() - torch.from_numpy(pixels(7)).int()).abs().float().mean() < 60
    assert all(v.dtype == torch.uint8 and v.shape == (3, 10, 12) for v in x.values())
    Image.new("F", (3, 3)).save(tmp_path/"train/a/float.tif")
    with pytest.raises(UserError, match=r"float.tif .*nothing says what white is"): load_dataset("folder", root=str(tmp_path), size=8)


def test_grey_folders_have_one_channel_and_refuse_a_colour_image(tmp_path):
    for i in range(4): picture(tmp_path/f"train/{'ab'[i % 2]}/{i}.png", i, mode="L"); picture(tmp_path/f"test/{'ab'[i % 2]}/{i}.png", 9 + i, mode="L")
    ds = load_dataset("folder", root=str(tmp_path), size=8)
    assert (ds.channels, len(ds.mean), len(ds.std)) == (1, 1, 1)
    p = Params(dataset="folder", root=str(tmp_path), size=8, encoder="resnet8", proj_hidden=8, proj_dim=4, B=2, epochs=1, warmup=0)
    for _ in train(Twins([p], dataset_of(p))): pass
    picture(tmp_path/"test/a/colour.png", 5)
    with pytest.raises(UserError, match="colour.png .*is a colour image among grey ones"): load_dataset("folder", root=str(tmp_path), size=8)


def test_links_in_a_folder_are_followed_once_and_not_in_circles(tmp_path):
    for s in ("train", "test"):
        for c in "ab": picture(tmp_path/f"mine/{s}/{c}/1.png")
    picture(tmp_path/"elsewhere/2.png", 7); picture(tmp_path/"elsewhere/deep/3.png", 8)
    (tmp_path/"mine/train/a/more").symlink_to(tmp_path/"elsewhere")
    (tmp_path/"elsewhere/deep/round").symlink_to(tmp_path/"elsewhere")                   # a circle beside the class
    assert sources.folder(str(tmp_path/"mine")).opened.paths == ("train/a/1.png", "train/a/more/2.png", "train/a/more/deep/3.png", "train/b/1.png", "test/a/1.png", "test/b/1.png")
    (tmp_path/"mine/train/b/all").symlink_to(tmp_path/"mine/train")                      # whose images would be of class b
    with pytest.raises(UserError, match="train/b/all: is a link to a folder above it"): sources.folder(str(tmp_path/"mine"))


def test_a_folder_in_the_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for s in ("train", "test"):
        for c in "ab": picture(tmp_path/f"birds/{s}/{c}/1.png")
    assert len(load_dataset("folder", root="~/birds", size=8).train) == 2


def test_unequal_sizes_and_class_names_with_spaces(tmp_path):
    for i, c in enumerate(["big dog", "Ünïcode 猫", "cat"]):
        for j in range(2): picture(tmp_path/f"train/{c}/{j}.png", 10 * i + j, (7 + 3 * i, 20 - 2 * j)); picture(tmp_path/f"val/{c}/{j}.png", 50 + 10 * i + j, (9, 9 + i))
    ds = load_dataset("folder", root=str(tmp_path), size=12)
    assert ds.class_names == ("big dog", "cat", "Ünïcode 猫") and ds.train.x.shape == (6, 3, 12, 12) and ds.found["splits"] == ["train", "val"]
    with pytest.raises(UserError, match="size = 0: the images are not all of one size"): load_dataset("folder", root=str(tmp_path))


def test_classes_that_the_splits_do_not_share_are_explained(tmp_path):
    tree(tmp_path, ("a", "b", "c"))
    for i in range(3): (tmp_path/f"test/c/{i}.png").unlink()
    with pytest.raises(UserError, match=r"class 2 \(c\) has no test sample; add some, or list the other classes"): load_dataset("folder", root=str(tmp_path), size=8)
    assert load_dataset("folder", root=str(tmp_path), size=8, classes=(0, 1)).excluded == 6
    (tmp_path/"train/empty").mkdir()
    with pytest.raises(UserError, match=r"class 3 \(empty\) has no train sample"): load_dataset("folder", root=str(tmp_path), size=8, classes=(0, 1, 3))
    picture(tmp_path/"test/d/0.png")
    with pytest.raises(UserError, match="1 classes of the test split are not in the training split: 'd'"): open_source("folder", str(tmp_path))


def test_duplicates_between_train_and_test_are_counted(tmp_path):
    tree(tmp_path, n=4, m=4)
    for i in (0, 2): (tmp_path/f"test/a/{i}.png").write_bytes((tmp_path/f"train/b/{i}.png").read_bytes())
    for size, kind in ((8, Split), (96, Stream)):
        ds = load_dataset("folder", root=str(tmp_path), size=size)
        assert isinstance(ds.train, kind) and data_record(ds)["identical"] == 2


def test_two_folders_are_never_one_run(tmp_path):
    from cl_nscl.plan import layered, study, twins_of
    a, b = tree(tmp_path/"birds"), tree(tmp_path/"other"/"birds", n=7)
    small = dict(dataset="folder", size=8, encoder="resnet8", proj_hidden=8, proj_dim=4, B=4, epochs=1, warmup=0.0, snapshots=1)
    run = stored_run(Params(**small, root=a), tmp_path/"runs")
    train_runs([run])
    record = json.loads((run.path/"data.json").read_text())
    assert [c["name"] for c in record["classes"]] == ["a", "b"] and record["train"] == 12 and record["fingerprint"] == fingerprint(open_source("folder", a))
    (run.path/"done.json").unlink()
    with pytest.raises(UserError, match="this run was trained on other data"): train_runs([stored_run(Params(**small, root=b), tmp_path/"runs")])
    s = [study(layered("folder", root=r)) for r in (a, str(tmp_path/"birds/../birds/"), tree(tmp_path/"fish"))]
    assert [x.title for x in s] == ["birds", "birds", "fish"] and [x.data for x in s] == ["birds", "birds", "fish"]
    ids = [run_id(twins_of(x, 0)[0]) for x in s]
    assert ids[0] == ids[1] != ids[2]
    from cl_nscl.plan import train_plan
    done = stored_run(Params(**small, root=a, data="birds"), tmp_path/"runs"); train_runs([done])
    with pytest.raises(UserError, match="this run was trained on other data"): train_plan([stored_run(Params(**small, root=b, data="birds"), tmp_path/"runs")])


def test_the_fingerprint_is_of_the_data_and_not_of_their_place(tmp_path):
    a, b = (open_source("folder", tree(tmp_path/k)) for k in ("x", "y/z"))
    assert fingerprint(a) == fingerprint(b)
    picture(tmp_path/"x/train/a/0.png", 77, (13, 10))
    assert fingerprint(open_source("folder", str(tmp_path/"x"))) != fingerprint(b)


# Streams

@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for k, c in enumerate("ab"):
        for i in range(5):
            for s in ("train", "val"): picture(root/f"{s}/{c}/{i}.jpg", 100 * k + i + 50 * (s == "val"), (150 + 10 * i, 120 + 7 * k))
    return str(root)


def test_R09_streamed_views_are_the_same_with_0_1_and_2_workers(photos):
    p = Params(dataset="imagenet1k", root=photos, size=80, B=4, blur=0.5, encoder="resnet8", proj_hidden=8, proj_dim=4, seed=3, epochs=2, warmup=0)
    state, got = torch.get_rng_state(), []
    for workers in (0, 1, 2):
        twins = Twins([replace(p, workers=workers)], dataset_of(replace(p, workers=workers)))
        assert isinstance(twins.ds.train, Stream) and twins.ds.train.workers == workers
        got.append([twin_batch(twins, t) for t in range(4)])
        assert twin_batch(twins, 1)[0].equal(got[-1][1][0])                               # any step, in any order
    for v, w in zip(got[0], zip(got[1], got[2])): assert all(v[0].equal(o[0]) and v[1].equal(o[1]) for o in w)
    assert not got[0][0][0].equal(got[0][2][0]) and torch.get_rng_state().equal(state)
    ids = {int(i) for t in range(2) for i in got[0][t][1]}
    assert ids == {0, 1}


def test_a_streamed_view_depends_on_its_image_and_its_numbers_alone(photos):
    p = Params(dataset="imagenet1k", root=photos, size=80)
    ds = dataset_of(p)
    u, spec = uniforms(0, 0, len(ds.train), 2), view_spec(p, ds)
    [both] = split_views(ds.train, torch.tensor([[7, 2, 9]]), u, spec)
    [alone] = split_views(ds.train, torch.tensor([[2]]), u, spec)
    assert both.shape == (2, 3, 3, 80, 80) and both[:, 1:2].equal(alone)


def test_a_streamed_crop_is_torchvisions_crop_of_the_whole_picture(photos):
    from torchvision.transforms.functional import resized_crop
    ds = load_dataset("imagenet1k", root=photos, size=80)
    boxes = lambda i, H, W: torch.tensor([[3, 5, H // 2, W // 2]])
    [x] = ds.train.crops(torch.tensor([[4]]), boxes)
    im = Image.open(Path(photos)/ds.train.opened.paths[int(ds.train.ids[4])]).convert("RGB")
    assert x[0, 0].permute(1, 2, 0).numpy().tolist() == np.asarray(resized_crop(im, 3, 5, im.height // 2, im.width // 2, [80, 80])).tolist()


def test_a_stream_can_be_handed_to_a_process_that_shares_no_memory(photos):
    ds = load_dataset("imagenet1k", root=photos, size=80)
    again = pickle.loads(pickle.dumps(ds.train))
    assert next(again.images(3)).equal(next(ds.train.images(3)))
    tables = sources.hub_source("mine", dict(train=table(4), test=table(2, 9)))
    assert pickle.loads(pickle.dumps(tables.opened)).raw(5) == tables.opened.raw(5)
    boxes = pickle.loads(pickle.dumps(partial(view_boxes, uniforms(0, 0, 10, 2), 0.2)))
    assert boxes(3, 100, 90).equal(view_boxes(uniforms(0, 0, 10, 2), 0.2, 3, 100, 90))


def test_D12_features_of_a_stream_are_the_same_each_time_and_in_the_splits_order(photos):
    p = Params(dataset="imagenet1k", root=photos, size=80, encoder="resnet8", proj_hidden=8, proj_dim=4, B=4, epochs=1)
    twins = Twins([p], dataset_of(p))
    h, again = (torch.cat([*features(twins.models[0], twins.ds.test, twins.spec, chunk=c)]) for c in (3, 3))
    assert h.equal(again) and len(h) == 10
    assert torch.cat([*replace(twins.ds.test, workers=1).images(4)]).equal(torch.cat([*twins.ds.test.images(512)]))
    some = twins.ds.test.rows(torch.tensor([9, 1]))
    assert torch.cat([*some.images()]).equal(twins.ds.test.x[torch.tensor([9, 1])]) and some.y.tolist() == [1, 0]


@pytest.mark.parametrize("name", ["digits", "textures"])
def test_D12_evaluation_views_hold_nothing_random(name):
    p = Params(dataset=name, n_train=40, size=16)
    ds = dataset_of(p)
    assert eval_view(ds.test.x[:9], view_spec(p, ds)).equal(eval_view(ds.test.x[:9], view_spec(p, ds)))


def test_D09_a_subset_of_a_stream_trains_a_head_of_two_and_stores_the_mapping(photos, tmp_path):
    picture(Path(photos)/"train/c/0.jpg", 1, (150, 120)); picture(Path(photos)/"val/c/0.jpg", 2, (150, 120))
    p = Params(dataset="imagenet1k", root=photos, classes=(2, 0), size=80, objective="ce", encoder="resnet8", proj_hidden=8, proj_dim=4, B=2, epochs=1, warmup=0, snapshots=1)
    run = stored_run(p, tmp_path/"runs")
    train_runs([run])
    record, done = (json.loads((run.path/f).read_text()) for f in ("data.json", "done.json"))
    assert [(c["label"], c["id"], c["name"]) for c in record["classes"]] == [(0, 2, "c"), (1, 0, "a")] and record["streamed"] and record["excluded"] == 10
    assert done["class_ids"] == [2, 0] and done["stem"] == "imagenet" and done["feature_dim"] == 64
    model = load_model(run, max(run.snapshots), dataset_of(p))
    assert model.head.weight.shape == (2, 4)


def test_D09_digits_seven_and_two(tmp_path):
    p = Params(dataset="digits", classes=(7, 2), size=8, objective="ce", encoder="resnet8", proj_hidden=8, proj_dim=4, B=50, epochs=1, warmup=0, snapshots=1)
    run = stored_run(p, tmp_path/"runs")
    train_runs([run])
    record, done = (json.loads((run.path/f).read_text()) for f in ("data.json", "done.json"))
    assert [(c["label"], c["id"]) for c in record["classes"]] == [(0, 7), (1, 2)] and done["class_ids"] == [7, 2] and done["stem"] == "small"   # D11
    assert load_model(run, max(run.snapshots), ds := dataset_of(p)).head.weight.shape == (2, 4) and set(ds.train.y.tolist()) == {0, 1}


@pytest.mark.parametrize("size, encoder, stem", [(32, "resnet18", "small"), (64, "resnet50", "small"), (96, "resnet18", "imagenet"), (224, "resnet50", "imagenet"), (32, "vit", "patch 4")])
def test_D11_the_stem_follows_the_size_and_is_what_is_recorded(size, encoder, stem):
    from cl_nscl.models import ENCODERS, encoder_record
    with torch.device("meta"): f = ENCODERS[encoder](3, size, 1.0)
    assert encoder_record(f)["stem"] == stem


# The hub

def table(n, seed=0, names=("no", "yes"), **features):
    cell = lambda i: dict(bytes=encoded(Image.fromarray(pixels(seed + i, 7 + i % 3, 9))), path=None)
    return datasets.Dataset.from_dict(dict(image=[cell(i) for i in range(n)], label=[i % 2 for i in range(n)]),
                                      features=datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(names))))


@pytest.mark.parametrize("kind", ["save_to_disk", "parquet", "plain parquet"])
def test_local_copies_of_hub_sets_are_read_without_a_network(tmp_path, monkeypatch, offline, kind):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path/"cache"))
    both, root = datasets.DatasetDict(train=table(10), validation=table(4, 50)), tmp_path/"copy"
    if kind == "save_to_disk": both.save_to_disk(str(root))
    else:
        (root/"data").mkdir(parents=True)
        for s, t in both.items():
            if kind == "parquet": t.to_parquet(str(root/f"data/{s}-00000-of-00001.parquet"))
            else:
                import pyarrow as pa, pyarrow.parquet as pq
                cells = t.cast_column("image", datasets.Image(decode=False))[:]
                pq.write_table(pa.table(dict(image=pa.array(cells["image"]), label=pa.array(cells["label"]))), root/f"data/{s}-00000-of-00001.parquet")
    ds = load_dataset("hub", root=str(root), data="me/mine", size=16)
    names = ("0", "1") if kind == "plain parquet" else ("no", "yes")
    assert (ds.class_names, len(ds.train), len(ds.test), ds.channels, ds.name) == (names, 10, 4, 3, "me/mine")
    src = open_source("hub", str(root))
    assert [*src.pixels(torch.tensor([11]))][0].permute(1, 2, 0).numpy().tolist() == pixels(51, 8, 9).tolist()
    st = load_dataset("hub", root=str(root), size=16, stream="yes", workers=1)
    assert isinstance(st.train, Stream) and torch.cat([*st.train.images()]).equal(torch.cat([*replace(st.train, workers=0).images()]))
    assert load_dataset("tiny_imagenet", root=str(root), size=16).class_names == names    # a named set from a local copy


def test_a_copy_is_read_in_a_process_without_network_and_with_the_hub_offline(tmp_path):
    datasets.DatasetDict(train=table(6), test=table(4, 50)).save_to_disk(str(tmp_path/"copy"))
    code = """
import socket, sys
def refused(*a, **k): raise SystemExit("the network was used")
socket.socket.connect = socket.getaddrinfo = refused
from cl_nscl.data import load_dataset
print(len(load_dataset("hub", root=sys.argv[1], size=8).train))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path/"copy")], capture_output=True, text=True, env=os.environ | dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path/"hf")), timeout=100)
    assert done.returncode == 0 and done.stdout.strip() == "6", done.stderr[-2000:]


def test_unlabelled_test_splits_are_passed_over_and_a_lone_training_split_is_divided():
    unlabelled = table(4, 90).remove_columns("label").add_column("label", [-1] * 4)
    src = sources.hub_source("mine", dict(train=table(10), test=unlabelled, validation=table(4, 50)))
    assert src.found["splits"] == ["train", "validation"] and len(src.test[0]) == 4
    alone = sources.hub_source("mine", dict(train=table(20)))
    assert (alone.train[0].bincount().tolist(), alone.test[0].bincount().tolist()) == ([8, 8], [2, 2]) and not set(alone.train[1].tolist()) & set(alone.test[1].tolist())
    words = table(4).remove_columns("label").add_column("class", ["cat", "dog", "cat", "dog"])
    assert sources.hub_source("mine", dict(train=words, test=words)).class_names == ("cat", "dog")


@pytest.mark.parametrize("kind", ["in memory", "save_to_disk", "parquet"])
def test_splits_that_list_their_classes_in_another_order_agree_on_what_a_label_is(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path/"cache"))
    splits = datasets.DatasetDict(train=table(6), test=table(4, 50, names=("yes", "no")))
    if kind == "save_to_disk": splits.save_to_disk(str(tmp_path/"copy"))
    if kind == "parquet":
        (tmp_path/"copy").mkdir()
        for s, t in splits.items(): t.to_parquet(str(tmp_path/f"copy/{s}.parquet"))
    src = sources.hub_source("mine", dict(splits) if kind == "in memory" else sources.local_tables(tmp_path/"copy"))
    assert (src.class_names, src.train[0].tolist(), src.test[0].tolist()) == (("no", "yes"), [0, 1] * 3, [1, 0] * 2)


def test_a_test_split_with_a_class_of_its_own_is_refused():
    with pytest.raises(UserError, match="class 'maybe' of the test split is none of the training split"): sources.hub_source("mine", dict(train=table(6), test=table(4, 50, names=("no", "maybe"))))
    numbers = table(4).remove_columns("label").add_column("label", [0, 1, 5, 0])
    with pytest.raises(UserError, match="mine: 5 in column 'label' is no class"): sources.hub_source("mine", dict(train=table(6), test=numbers))
    words = table(4).remove_columns("label").add_column("label", ["yes", "no", "no", "no"])
    assert sources.hub_source("mine", dict(train=table(6), test=words)).test[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("column, says", [([0, None, 1, None, 0, 1], "2 of 6 rows"), (["a", "b", None, "a", "b", "a"], "1 of 6 rows"), ([0, 1, -1, 0, 1, 0], "1 of 6 rows"), ([0.0, 1.0, float("nan"), 0.0, 1.0, 1.0], "1 of 6 rows"),
                                          ([[0, 1]] * 6, "not one label for a row")], ids=["numbers", "words", "negative", "nan", "lists"])
def test_training_rows_without_a_label_are_no_class(column, says):
    some = table(6).remove_columns("label").add_column("label", column)
    with pytest.raises(UserError) as e: sources.hub_source("mine", dict(train=some, test=table(2, 50)))
    assert str(e.value).startswith("mine: ") and says in str(e.value) and "'label'" in str(e.value) and "\n" not in str(e.value)
    unlabelled = table(6).remove_columns("label").add_column("label", [0, 1, -1, 0, 1, 0]).cast_column("label", table(2).features["label"])
    with pytest.raises(UserError, match="1 of 6 rows of the training split have no label in column 'label'"): sources.hub_source("mine", dict(train=unlabelled, test=table(2, 50)))


def test_two_sets_with_the_same_labels_are_told_apart_by_their_bytes():
    a, b, c = (fingerprint(sources.hub_source("mine", dict(train=table(6, k), test=table(2, 9)))) for k in (0, 0, 100))
    assert a == b != c


@pytest.mark.parametrize("data, asked", [("me/mine", ("me/mine", None, None)), ("me/mine:small", ("me/mine", "small", None)), ("me/mine:small@v2", ("me/mine", "small", "v2")), ("me/mine@abc", ("me/mine", None, "abc"))])
def test_a_hub_set_is_named_with_its_configuration_and_revision(monkeypatch, data, asked):
    got = []
    def load(path, name, revision): got.append((path, name, revision)); return datasets.DatasetDict(train=table(6), test=table(2, 9))
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_dataset("hub", data=data, size=8).name == data and got == [asked]


def test_a_missing_library_is_one_clear_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"^the Hugging Face library is missing: pip install datasets, or in a clone of the project pip install -e '\.\[hub\]'$"): load_dataset("hub", data="me/mine", size=8)


@pytest.mark.parametrize("name, words", [("cifar10", ["cifar-10-batches-py", "cifar-10-python.tar.gz"]), ("cifar100", ["cifar-100-python"]), ("tiny_imagenet", ["val/val_annotations.txt", "zh-plus/tiny-imagenet"]),
                                         ("mini_imagenet", ["train.csv", "timm/mini-imagenet"]), ("imagenet1k", ["train/ and val/", "ILSVRC/imagenet-1k"])])
def test_missing_data_are_one_message_with_what_where_and_two_ways(name, words, offline, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for root in ("", str(tmp_path/"mine")):
        (tmp_path/"mine").mkdir(exist_ok=True)
        with pytest.raises(MissingData) as e: load_dataset(name, root=root, size=32)
        text = str(e.value)
        for word in (*words, root or str(tmp_path/"cache"), "Either ", ", or ", "nothing is downloaded when root is given" if root else "failed"): assert word in text, (word, text)
        assert "\n" not in text
    with pytest.raises(MissingData): open_source(name, download=False)


# From the command line

def test_a_folder_of_images_goes_from_one_command_to_results_under_its_name(tmp_path):
    tree(tmp_path/"birds", ("big dog", "cat"), n=30, m=12, size=(20, 24))
    args = [sys.executable, "-m", "cl_nscl.run", "reproduce", "folder", "--set", f"root={tmp_path/'birds'}", "B=20", "B_ref=20", "epochs=1", "warmup=0", "size=12", "proj_hidden=8", "proj_dim=4",
            "objectives=[cl, nscl]", "snapshots=1", "batch_sizes=[10, 20]", "--experiment", "01_alignment", "--jobs", "1"]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path/"results/birds/01_alignment.ipynb").exists() and "to train: about" in done.stdout
    tree(tmp_path/"elsewhere/birds", ("big dog", "cat"), n=31, m=12, size=(20, 24))
    args[6] = f"root={tmp_path/'elsewhere/birds'}"
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 2 and "this run was trained on other data" in done.stderr and "Traceback" not in done.stderr
