"""A lockstep step of four twins, views included, against the sum of the four bare forward and backward passes.

    python bench/step.py [rounds]      prints a Markdown table: medians of interleaved rounds, as ratios

Seconds are CPU time of one thread, so that other work on the machine counts less. `bare` is forward and backward alone, on
views that are already there, in the layout that the trainer uses; the step adds views, losses, clipping and the optimizer.
"""
import dataclasses, statistics, sys, time
from pathlib import Path

import torch

from cl_nscl.core import Params
from cl_nscl.data import Dataset, Split
from cl_nscl.plan import layered, study, twins_of
from cl_nscl.store import provenance
from cl_nscl.twins import LAYOUT, Twins, dataset_of, twin_batch, twin_step

OBJECTIVES = ("cl", "nscl", "scl", "ce")


def random_images(N, C=10):
    g = torch.Generator().manual_seed(0)
    split = Split(torch.randint(0, 256, (N, 3, 32, 32), generator=g, dtype=torch.uint8), torch.arange(N) % C, torch.arange(N))
    return Dataset("random", split, split, tuple(range(C)), tuple(map(str, range(C))), (0.5,) * 3, (0.25,) * 3)


def seconds(fn):
    start = time.process_time()
    fn()
    return time.process_time() - start


def bare(twins, v):
    x = v.flatten(0, 1).contiguous(memory_format=LAYOUT)
    for m in twins.models:
        m.train()
        _, z = m(x)
        z.square().sum().backward()
        m.zero_grad(set_to_none=True)


def measure(runs, ds, rounds):
    twins = Twins(runs, ds)
    twin_step(twins); bare(twins, v := twin_batch(twins, 1)[0])
    times = [(seconds(lambda: twin_step(twins)), seconds(lambda: bare(twins, v)), seconds(lambda: twin_batch(twins, twins.t))) for _ in range(rounds)]
    return [statistics.median(t) for t in zip(*times)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    big = Params(dataset="digits", encoder="resnet18", B=128, epochs=100, lr=0.01)
    cases = [("ResNet-18, 32 x 32, B = 128", [dataclasses.replace(big, objective=o) for o in OBJECTIVES], random_images(1280), rounds)]
    digits = twins_of(study(layered("digits")), 0)
    cases.append(("digits' own recipe: ResNet-8, 16 x 16, B = 200", digits, dataset_of(digits[0]), 4 * rounds))
    print(f"{provenance()['cpu'] or provenance()['machine']}, one thread, torch {torch.__version__}\n")
    print("| four twins | step, s | bare passes, s | step / bare | views, share of the step |\n|---|---|---|---|---|")
    for name, runs, ds, n in cases:
        step, passes, batch = measure(runs, ds, n)
        print(f"| {name} | {step:.2f} | {passes:.2f} | {step / passes:.2f} | {batch / step:.1%} |", flush=True)
