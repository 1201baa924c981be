"""Time of CDNV over all pairs of classes at once, beside a loop over the pairs.

    python bench/collapse.py > bench/collapse.md      about two minutes
"""
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from cl_nscl.collapse import cdnv, directional_cdnv
from cl_nscl.core import generator

D, PER_CLASS, ROUNDS = 128, 20, {10: 9, 100: 5, 1000: 1}


def loop(h, y, directional):
    "Pair by pair; means and variances are taken once per class."
    own = [h[y == c].double() for c in range(int(y.max()) + 1)]
    mean = [v.mean(0) for v in own]
    own = [v - m for v, m in zip(own, mean)]
    var, total, pairs = [v.square().sum(1).mean() for v in own], 0.0, 0
    for i in range(len(own)):
        for j in range(i):
            u = mean[i] - mean[j]
            dist2 = u @ u
            a, b = [(v @ u).square().mean() / dist2 for v in (own[i], own[j])] if directional else (var[i], var[j])
            total, pairs = total + (a + b) / (2 * dist2), pairs + 1
    return float(total / pairs)


def timed(f, *args):
    start = time.perf_counter()
    value = f(*args)
    return time.perf_counter() - start, value


def main():
    torch.set_num_threads(1)
    print(f"All pairs of C classes, {PER_CLASS} rows each, d = {D}, float32 features, 1 thread; {os.cpu_count()} cores, torch {torch.__version__}.")
    print("Medians over rounds in which both run once, and the median of their ratio.\n")
    print("| | C | pairs | loop, ms | at once, ms | ratio | relative difference |\n|---|---|---|---|---|---|---|")
    for name, f, directional in (("CDNV", cdnv, False), ("directional CDNV", directional_cdnv, True)):
        for C, rounds in ROUNDS.items():
            h, y = torch.randn(C * PER_CLASS, D, generator=generator(0, "bench", C)), torch.arange(C).repeat(PER_CLASS)
            f(h, y)
            both = [(timed(loop, h, y, directional), timed(f, h, y)) for _ in range(rounds)]
            slow, fast = (1000 * statistics.median(r[k][0] for r in both) for k in (0, 1))
            ratio, off = statistics.median(a[0] / b[0] for a, b in both), abs(both[0][0][1] / both[0][1][1] - 1)
            print(f"| {name} | {C:,} | {C * (C - 1) // 2:,} | {slow:,.3g} | {fast:,.3g} | {ratio:,.1f} | {off:.0e} |", flush=True)


if __name__ == "__main__": main()
