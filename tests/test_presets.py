"The preset paper, resolved for each data set, against what arXiv 2510.08852 prints; plans of sets that are not on the disk."
import pytest

from cl_nscl import plan as planning
from cl_nscl.data import MissingData
from cl_nscl.optim import peak_lr
from cl_nscl.plan import layered, operations, plan, source_of, study, study_files, train_size, twins_of

SETS = ("cifar10", "cifar100", "mini_imagenet", "tiny_imagenet", "imagenet1k")
ALL = dict(encoder="resnet50", width=1.0, proj_hidden=2048, proj_dim=128, optimizer="lars", momentum=0.9, weight_decay=1e-6, lr=0.3, B_ref=256, lr_rule="linear", warmup=10.0, B=1024, clip=1.0,
           K=2, jitter=0.8, grey=0.2, flip=0.5, taus=(0.1, 0.5, 1.0), batch_sizes=(256, 512, 1024), n_train=0, class_n=0, classes=(), n_ref=10_000, sweep_epochs=300, class_epochs=1000, control=0, probe="adam")
SMALL = dict(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, blur=0.0)
LARGE = dict(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.2, blur=0.1, size=224)
PAPER = dict(
    cifar10=SMALL | dict(size=32, tau=0.5, epochs=1200, class_counts=(2, 4, 6, 8)),
    cifar100=SMALL | dict(size=32, tau=0.1, epochs=1200, class_counts=(4, 6, 8, 10, 50)),
    mini_imagenet=LARGE | dict(tau=0.1, epochs=1200, class_counts=(4, 6, 8, 10, 50)),
    tiny_imagenet=SMALL | dict(size=64, tau=0.1, epochs=1200, class_counts=(4, 6, 8, 10, 50, 100)),
    imagenet1k=LARGE | dict(tau=0.1, epochs=300, class_epochs=300, class_counts=(5, 10, 50, 100, 500, 1000)))


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    "A machine without any data."
    monkeypatch.setenv("CL_NSCL_DATA", str(tmp_path))
    planning._source.cache_clear(); planning._train_size.cache_clear()
    yield
    planning._source.cache_clear(); planning._train_size.cache_clear()


@pytest.mark.parametrize("name", SETS)
def test_the_paper_preset_is_the_printed_recipe(name):
    s = study(layered(name, "paper"))
    for k, v in (ALL | PAPER[name]).items(): assert getattr(s, k) == v, (k, getattr(s, k), v)
    assert peak_lr(twins_of(s, 0)[0]) == pytest.approx(0.3 * 1024 / 256)
    assert s.dataset == name and [p.objective for p in twins_of(s, 0)] == ["cl", "nscl", "scl", "ce"]


def test_a_preset_keeps_what_belongs_to_the_data_set():
    s = study(layered("digits", "paper"))
    assert (s.flip, s.saturation, s.size, s.epochs) == (0.0, 0.0, 16, 1200)


def test_a_presets_part_for_one_data_set_comes_after_it_and_is_no_name_of_its_own():
    assert "imagenet1k.paper" not in study_files() and "imagenet1k" in study_files()
    assert layered("imagenet1k", "paper", "smoke")["epochs"] == 2 and layered("imagenet1k", "paper", epochs=7)["epochs"] == 7


@pytest.mark.parametrize("name, N, C", [("cifar10", 50_000, 10), ("cifar100", 50_000, 100), ("mini_imagenet", 50_000, 100), ("tiny_imagenet", 100_000, 200), ("imagenet1k", 1_281_167, 1000)])
def test_a_plan_needs_no_data_on_the_disk_but_a_run_does(nowhere, name, N, C):
    s = study(layered(name, "paper"))
    runs = plan(s)
    assert train_size(runs[0].p) == N and len(source_of(s).class_ids) == C and source_of(s).pixels is None
    assert len(runs) == len({r.id for r in runs}) > 40


def test_operations_are_counted_not_timed(nowhere):
    one = plan(study(layered("cifar10", "paper")), ["01_alignment"])[:1]
    per_image = operations(one) / (48 * 1200 * 1024)
    assert 2.5e9 * 3 * 2 * 0.9 < per_image < 2.7e9 * 3 * 2 * 1.1               # 2.6 GFLOP forward, twice that backward, two views


def test_dry_run_of_the_paper_says_runs_hours_and_that_the_data_are_missing(nowhere, capsys, tmp_path, monkeypatch):
    from cl_nscl.run import main
    monkeypatch.chdir(tmp_path)
    code = main(["reproduce", "cifar100", "--preset", "paper", "--dry-run", "--jobs", "1", "--set", "width=0.1", "proj_hidden=16", "class_counts=[4, 50]"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 and sum("to do" in l for l in lines) == len(lines) - 4 and any("50 classes  objective cl" in l for l in lines)
    assert "cifar100 is not on this machine: planned with its published N = 50,000, timed on noise of its shape" in lines
    assert "GPU-hours" in lines[-3] and "each epoch leaves out 848 of the 50,000" in lines[-2] and "to train: about" in lines[-1] and not [*tmp_path.iterdir()]
    assert max(map(len, lines)) < 220


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_laptop_recipes_of_cifar_fit_two_hours_of_two_cores(nowhere, name):
    "At 0.75 core-seconds for a step of one model on 200 images."
    runs = plan(study(layered(name)))
    assert 0.75 * sum(planning.images(r) for r in runs) / 200 < 2 * 2 * 3600


def test_a_run_of_missing_data_is_refused_before_anything_is_written(nowhere, tmp_path, monkeypatch, capsys):
    from cl_nscl.run import main
    monkeypatch.chdir(tmp_path)
    code = main(["reproduce", "tiny_imagenet", "--preset", "smoke", "--set", f"root={tmp_path}"])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("cl-nscl reproduce: tiny_imagenet: found no") and err.count("\n") == 1 and not [*tmp_path.iterdir()]
