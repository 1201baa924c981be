"""Time and memory of one forward and backward pass of the contrastive losses, beside other libraries.

    python bench/losses.py            the table, as markdown (about four minutes on an idle machine)

Times: medians over rounds in which every contestant runs once, as ratios to `cl_loss` of the same round (1 thread / 2 threads).
A machine that others use tells little at 2 threads: each parallel region waits for the slower core. The load is printed.
Memory: the peak resident size of a process of its own (VmHWM, reset after a small warm-up pass) above its size before the pass.
Other libraries are optional: pip install lightly pytorch-metric-learning.
"""
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from cl_nscl import losses as L
from cl_nscl.core import generator

D, TAU, SIZES = 128, 0.5, (256, 512, 1024, 2048, 4096)


def bare(z, y):
    s = z.flatten(0, 1) @ z.flatten(0, 1).T / TAU
    return torch.logsumexp(s, 1).mean()


def peer(module, name, call):
    "A loss of another library; ModuleNotFoundError where it is not installed."
    loss = getattr(importlib.import_module(module), name)(temperature=TAU)
    return lambda z, y: call(loss, z, y)


PML, two_views = "pytorch_metric_learning.losses", lambda loss, z, y: loss(z[0], z[1])
CONTESTANTS = {  # name: makes the loss (pytorch-metric-learning's NTXentLoss lists its pairs and triplets: 2 GB at B = 256, left out)
    "cl_loss": lambda: lambda z, y: L.cl_loss(z, y, TAU),
    "nscl_loss": lambda: lambda z, y: L.nscl_loss(z, y, TAU),
    "ntxent_loss": lambda: lambda z, y: L.ntxent_loss(z, y, TAU),
    "scl_loss": lambda: lambda z, y: L.scl_loss(z, y, TAU),
    "cl_loss, reduction none": lambda: lambda z, y: L.cl_loss(z, y, TAU, reduction="none").mean(),
    "cl_loss, chunk=0": lambda: lambda z, y: L.cl_loss(z, y, TAU, chunk=0),
    "matrix product and logsumexp alone": lambda: bare,
    "lightly DCLLoss": lambda: peer("lightly.loss", "DCLLoss", two_views),
    "lightly NTXentLoss": lambda: peer("lightly.loss", "NTXentLoss", two_views),
    "pytorch-metric-learning SupConLoss": lambda: peer(PML, "SupConLoss", lambda loss, z, y: loss(z.flatten(0, 1), y.repeat(2))),
}


def problem(B):
    return torch.randn(2, B, D, generator=generator(0, "bench", B)).requires_grad_(), torch.arange(B) % 10


def step(loss, z, y):
    z.grad = None
    loss(z, y).backward()


def seconds(losses, B, rounds):
    z, y = problem(B)
    times = {name: [] for name in losses}
    for loss in losses.values(): step(loss, *problem(64))             # warm up
    for _ in range(rounds):
        for name, loss in losses.items():
            start = time.perf_counter()
            step(loss, z, y)
            times[name].append(time.perf_counter() - start)
    return times


def memory(name):
    "Peak extra MB at every size, in this process."
    torch.set_num_threads(1)
    loss, peaks = CONTESTANTS[name](), {}
    kb = lambda key: int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])
    step(loss, *problem(16))
    for B in SIZES:
        z, y = problem(B)
        Path("/proc/self/clear_refs").write_text("5")
        before = kb("VmRSS")
        step(loss, z, y)
        peaks[B] = (kb("VmHWM") - before) / 1024
    print(json.dumps(peaks))


def main():
    losses, missing, cells, load = {}, [], {}, [os.getloadavg()[0]]
    for name, make in CONTESTANTS.items():
        try: losses[name] = make()
        except ModuleNotFoundError as e: missing.append(f"{name}: {e.name} is not installed")
    for B in SIZES:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            times = seconds(losses, B, 9 if B <= 1024 else 3)
            for name, t in times.items():
                ratio = statistics.median(a / b for a, b in zip(t, times["cl_loss"]))
                cells.setdefault((name, B), []).append(f"{1000*statistics.median(t):.3g} ms" if name == "cl_loss" else f"{ratio:.2f}")
    for name in losses:
        out = subprocess.run([sys.executable, __file__, "memory", name], capture_output=True, text=True, check=True).stdout
        for B, mb in json.loads(out.splitlines()[-1]).items(): cells[name, int(B)].append(f"{mb:.0f} MB")
    load.append(os.getloadavg()[0])
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown CPU")
    print(f"One forward and backward pass, K = 2, d = {D}, float32, tau = {TAU}, B images (2 B rows); {cpu}, {os.cpu_count()} cores, torch {torch.__version__}; load {load[0]:.1f} before, {load[1]:.1f} after.")
    print("First row: time with 1 thread, with 2 threads, peak extra memory. Other rows: time as a multiple of the first row's.\n")
    print("| | " + " | ".join(f"B = {B:,}" for B in SIZES) + " |\n" + "|---" * (len(SIZES) + 1) + "|")
    for name in losses: print(f"| {name} | " + " | ".join(" / ".join(cells[name, B]) for B in SIZES) + " |")
    if max(load) > 1: print("\nOther work ran beside this: the values for 2 threads are not to be relied on.")
    for line in missing: print(f"\n{line}")


if __name__ == "__main__": memory(sys.argv[2]) if sys.argv[1:2] == ["memory"] else main()
