"""Views per second of 32 x 32 colour images against other libraries, SimCLR's recipe. Writes bench/views.md.

    python bench/views.py [rounds]

The contenders take turns, round after round; the table has the median of the rounds. Times are wall clock; `cpu` is the
processor time of the same work, which other programs on the machine disturb less. Kornia is left out if not installed.
"""
import os, platform, statistics, sys, time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")   # waiting threads sleep: on a busy machine spinning costs ten times and more

import torch, torchvision
from torchvision.transforms import v2
import torchvision.transforms as v1

from cl_nscl.data import load_dataset
from cl_nscl.views import ViewSpec, uniforms, views

B, K = 256, 2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def cpu_name():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((l.split(":")[1].strip() for l in lines if l.startswith("model name")), platform.processor() or platform.machine())


def contenders(x):
    "Name -> a function that makes K views of all images, float32, normalised."
    recipe = lambda t: [t.RandomResizedCrop(32, scale=(0.2, 1.0)), t.RandomHorizontalFlip(), t.RandomApply([t.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8), t.RandomGrayscale(0.2)]
    pil = [v1.functional.to_pil_image(i) for i in x]
    old = v1.Compose([*recipe(v1), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    new = v2.Compose([v2.ToDtype(torch.float32, scale=True), *recipe(v2), v2.Normalize(MEAN, STD)])
    spec, u = ViewSpec(32, mean=MEAN, std=STD), uniforms(0, 0, len(x), K)
    runs = {"cl_nscl.views": lambda: views(x, u, spec),
            "torchvision v1, PIL, per sample": lambda: torch.stack([old(i) for _ in range(K) for i in pil]),
            "torchvision v2, tensors, per sample": lambda: torch.stack([new(i) for _ in range(K) for i in x])}
    try: import kornia.augmentation as A
    except ImportError: return runs
    both = A.AugmentationSequential(A.RandomResizedCrop((32, 32), scale=(0.2, 1.0)), A.RandomHorizontalFlip(), A.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8), A.RandomGrayscale(p=0.2),
                                    A.Normalize(torch.tensor(MEAN), torch.tensor(STD)), data_keys=["input"])
    return runs | {"kornia, batch, one order of colours for all": lambda: torch.stack([both(x.float() / 255) for _ in range(K)])}


def measure(threads, rounds):
    torch.set_num_threads(threads)
    runs = contenders(load_dataset("textures", n_train=B).train.x)
    wall, cpu = {k: [] for k in runs}, {k: [] for k in runs}
    for r in range(rounds + 1):                                                  # the first round warms up
        for k, run in runs.items():
            w, c = time.perf_counter(), time.process_time(); run()
            if r: wall[k].append(B * K / (time.perf_counter() - w)); cpu[k].append(B * K / (time.process_time() - c))
    wall, cpu = ({k: statistics.median(v) for k, v in d.items()} for d in (wall, cpu))
    mine = "cl_nscl.views"
    return [f"| {k} | {threads} | {wall[k]:,.0f} | {wall[mine] / wall[k]:.1f} | {cpu[k]:,.0f} | {cpu[mine] / cpu[k]:.1f} |" for k in runs]


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    rows = [row for threads in (1, 2) for row in measure(threads, rounds)]
    text = f"""# Views per second

{K} views of {B} colour images of 32 x 32: random resized crop, flip, colour jitter, grey, normalisation. Medians of {rounds}
interleaved rounds on {cpu_name()} ({os.cpu_count()} cores, other programs running), torch {torch.__version__}, torchvision {torchvision.__version__}. Ratio: how many times faster `cl_nscl.views` is.

| | threads | views / s | ratio | views / cpu s | ratio |
|---|---|---|---|---|---|
""" + "\n".join(rows) + "\n"
    Path(__file__).with_suffix(".md").write_text(text); print(text)
