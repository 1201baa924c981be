"""Training the runs of an experiment with two processes, beside one: wall time from nothing, alternately.

    python bench/study.py [EXPERIMENT [ROUNDS]]      digits, 03_temperature, 2 rounds: about ten minutes; nothing else should run
"""
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from cl_nscl.plan import layered, plan, study, train_plan, train_size
from cl_nscl.twins import clock


def timed(experiment, jobs):
    with tempfile.TemporaryDirectory() as folder:
        runs = plan(study(layered("digits", runs=folder)), [experiment])
        start = time.perf_counter()
        train_plan(runs, jobs)
        return time.perf_counter() - start, len(runs), sum(clock(r.p, train_size(r.p)).T for r in runs)


if __name__ == "__main__":
    experiment, rounds = sys.argv[1] if len(sys.argv) > 1 else "03_temperature", int(sys.argv[2]) if len(sys.argv) > 2 else 2
    print(f"| {experiment}, round | runs, steps | one process | two processes | times as fast |\n|---|---|---|---|---|")
    for i in range(1, rounds + 1):
        (one, n, steps), (two, *_) = timed(experiment, 1), timed(experiment, 2)
        print(f"| {i} | {n}, {steps:,} | {one:.1f} s | {two:.1f} s | {one / two:.2f} |", flush=True)
