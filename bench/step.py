"""The lockstep step of 1, 2 and 4 twins, views and all, against the bare forward and backward passes of their encoders.

    python bench/step.py                                                       the CPU: ResNet-18 and digits' own recipe
    python bench/step.py --device cuda --precision bfloat16 --encoder resnet50 --B 1024 --rounds 20
    python bench/step.py --recipe digits --variants deterministic=1 chunk=50   also other ways to take the same step

Prints Markdown; --out FILE writes it, too. A bare pass has views that are there already, the trainer's layout, precision and
switches; the step adds the batch, its views, the losses, clipping and the optimizer. Step and bare pass take turns; each
number is the median of the rounds. On a CPU seconds are processor time of one thread, so that other work on the machine
counts less; on a GPU they are time on the wall, from one synchronisation to the next.
"""
import argparse, dataclasses, platform, statistics, time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from cl_nscl.core import Params
from cl_nscl.data import Dataset, Split
from cl_nscl.optim import peak_lr, schedule, step as update
from cl_nscl.plan import layered, study, twins_of
from cl_nscl.store import provenance
from cl_nscl.train import setting
from cl_nscl.twins import LAYOUT, Twins, arithmetic, autocast, dataset_of, step_randomness, twin_batch, twin_images, twin_loss, twin_outputs, twin_step
from cl_nscl.views import views

OBJECTIVES = ("cl", "nscl", "scl", "ce")
PHASES = ("decode", "views", "forward", "metrics", "backward", "optimizer")


def random_images(N, size, C=10):
    g = torch.Generator().manual_seed(0)
    split = Split(torch.randint(0, 256, (N, 3, size, size), generator=g, dtype=torch.uint8), torch.arange(N) % C, torch.arange(N))
    return Dataset("random", split, split, tuple(range(C)), tuple(map(str, range(C))), (0.5,) * 3, (0.25,) * 3)


class Clock:
    "Seconds since it was last asked: processor time on a CPU, time on the wall on a GPU that has finished."
    def __init__(self, device): self.device, self.at = device, 0.0; self()
    def __call__(self):
        if self.device.type == "cuda": torch.cuda.synchronize(self.device)
        now = time.perf_counter() if self.device.type == "cuda" else time.process_time()
        gone, self.at = now - self.at, now
        return gone


def bare(twins, v):
    "Forward and backward of every twin, nothing else."
    for m in twins.models:
        m.train()
        with arithmetic(twins.p, twins.device):
            with autocast(twins.p, twins.device): _, z = m(v.flatten(0, 1).contiguous(memory_format=LAYOUT))
            z.float().square().sum().backward()
        m.zero_grad(set_to_none=True)


def phased_step(twins, tick):
    "`twin_step`, taken apart: the seconds of each phase. Leaves the twins where `twin_step` would."
    p, t, spent = twins.p, twins.t, dict.fromkeys(PHASES, 0.0)
    def done(phase): spent[phase] += tick()
    tick()
    with arithmetic(p, twins.device):
        x, u, y = twin_images(twins, t); done("decode")
        v = views(x, u, twins.spec); done("views")
        for i, (q, model, optimizer) in enumerate(zip(twins.runs, twins.models, twins.optimizers)):
            model.train()
            optimizer.zero_grad(set_to_none=True); done("optimizer")
            with step_randomness(q.seed, t, twins.device): out = twin_outputs(twins.nets[i], q, v)
            done("forward")
            loss = twin_loss(out, y, q, t, twins.device.type == "cpu"); done("metrics")
            scaler = twins.scalers[i]
            (scaler.scale(loss) if scaler else loss).backward(); done("backward")
            for group in optimizer.param_groups: group["lr"] = peak_lr(p) * schedule(t, twins.clock.T, twins.clock.warmup)
            update(optimizer, model.parameters(), p.clip, scaler); done("optimizer")
    twins.t += 1
    return spent


def measure(runs, ds, device, rounds, counts):
    "For each number of twins: median seconds of a step and of the bare passes; and the phases of a step of all."
    groups = [Twins(runs[:n], ds, device) for n in counts]
    tick, v, check = Clock(groups[0].device), twin_batch(groups[0], 0)[0], groups[0].device.type == "cpu"
    for tw in groups if rounds > 1 else groups[:1]: twin_step(tw, check) # memory and kernels are there
    bare(Twins(runs[:1], ds, device), v)
    took = {n: ([], []) for n in counts}
    for _ in range(rounds):
        for n, tw in zip(counts, groups):
            tick(); twin_step(tw, check); took[n][0].append(tick()); bare(tw, v); took[n][1].append(tick())
    phases = [phased_step(groups[-1], tick) for _ in range(max(1, rounds // 2))]
    return {n: tuple(map(statistics.median, t)) for n, t in took.items()}, {k: statistics.median(s[k] for s in phases) for k in PHASES}


def variants(runs, ds, device, rounds, changes):
    "Seconds of a step with each change, over those of a plain step."
    groups = [Twins([dataclasses.replace(p, **c) for p in runs], ds, device) for c in ({}, *changes)]
    tick, took = Clock(groups[0].device), [[] for _ in groups]
    for tw in groups: twin_step(tw)
    for _ in range(rounds):
        for tw, t in zip(groups, took): tick(); twin_step(tw); t.append(tick())
    plain, *others = map(statistics.median, took)
    return [o / plain for o in others]


def flops(p, ds):
    "Floating-point operations of one twin's bare pass."
    tw = Twins([dataclasses.replace(p, compile=0, precision="float32")], ds, "meta")
    with FlopCounterMode(display=False) as counter: bare(tw, torch.empty(p.K, p.B, ds.channels, p.size, p.size, device="meta"))
    return counter.get_total_flops()


def peak(device, precision):
    "FLOP/s of a matrix product in the run's precision: what the device can do."
    n = 8192 if device.type == "cuda" else 1536
    a = torch.randn(n, n, device=device, dtype=getattr(torch, precision))
    tick, best = Clock(device), 0.0
    for _ in range(6): tick(); a @ a; best = max(best, 2 * n**3 / tick())
    return best


def table(name, runs, ds, args, rounds):
    device, p = torch.device(args.device), runs[0]
    counts = [n for n in args.twins if n <= len(runs)]
    took, phases = measure(runs, ds, device, rounds, counts)
    lines = [f"### {name}\n", f"{f'Medians of {rounds} rounds' if rounds > 1 else 'One round'}.\n", "| twins | step, s | images / s | bare passes, s | throughput, of bare |", "|---|---|---|---|---|"]
    lines += [f"| {n} | {s:.3f} | {p.B / s:,.1f} | {b:.3f} | {b / s:.3f} |" for n, (s, b) in took.items()]
    whole = sum(phases.values())
    lines += [f"\nShares of the step of {counts[-1]}:\n", f"| {' | '.join(PHASES)} |", "|---" * len(PHASES) + "|", f"| {' | '.join(f'{phases[k] / whole:.1%}' for k in PHASES)} |"]
    work, top, (s, b) = flops(p, ds) * counts[-1], args.peak * 1e12 if args.peak else peak(device, p.precision), took[counts[-1]]
    lines.append(f"\nRoofline: {work / 1e12:.2f} TFLOP of convolutions and products; bare {work / b / 1e9:,.0f} GFLOP/s, step {work / s / 1e9:,.0f} GFLOP/s, "
                 f"that is {work / b / top:.0%} and {work / s / top:.0%} of {top / 1e9:,.0f} GFLOP/s ({'given' if args.peak else 'a matrix product'}).")
    if changes := [dict([setting(c)]) for c in args.variants]:
        ratios = variants(runs[:1], ds, args.device, rounds, changes)
        lines += ["\n| a step of one twin with | of a plain step |", "|---|---|", *(f"| {c} | {r:.2f} |" for c, r in zip(args.variants, ratios))]
    return "\n".join(lines) + "\n"


def machine(device):
    info = provenance()
    return f"{info['gpu'] if device.startswith('cuda') else (info['cpu'] or platform.machine()) + ', one thread'}, torch {torch.__version__}"


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--recipe", choices=("both", "images", "digits"), default="both", help="random colour images, digits' own recipe, or both")
    a.add_argument("--device", default="cpu"); a.add_argument("--precision", default="float32"); a.add_argument("--encoder", default="resnet18")
    a.add_argument("--size", type=int, default=32); a.add_argument("--B", type=int, default=256); a.add_argument("--compile", type=int, default=0)
    a.add_argument("--twins", type=int, nargs="+", default=[1, 2, 4]); a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--peak", type=float, default=0, help="the device's peak in TFLOP/s; without: measured with a matrix product")
    a.add_argument("--variants", nargs="*", default=[], metavar="NAME=VALUE", help="parameters to compare with a plain step")
    a.add_argument("--out", type=Path)
    args = a.parse_args()
    torch.set_num_threads(1)
    text = [f"{machine(args.device)}; {args.precision}.\n"]
    if args.recipe != "digits":
        p = Params(dataset="digits", encoder=args.encoder, size=args.size, B=args.B, precision=args.precision, compile=args.compile, epochs=1000, lr=0.01)
        text.append(table(f"{args.encoder}, {args.size} x {args.size}, B = {args.B}", [dataclasses.replace(p, objective=o) for o in OBJECTIVES], random_images(4 * args.B, args.size), args, args.rounds))
    if args.recipe != "images":
        runs = [dataclasses.replace(p, precision=args.precision, compile=args.compile) for p in twins_of(study(layered("digits")), 0)]
        text.append(table(f"digits' own recipe: {runs[0].encoder}, {runs[0].size} x {runs[0].size}, B = {runs[0].B}", runs, dataset_of(runs[0]), args, 4 * args.rounds))
    print("\n".join(text))
    if args.out: args.out.write_text("\n".join(text))


if __name__ == "__main__": main()
