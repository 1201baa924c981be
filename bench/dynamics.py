"Time of similarity descent: 1,000 steps of CL and NSCL with their certificates, and 11 snapshots with every bound."
import argparse, time

import torch

from cl_nscl.core import generator
from cl_nscl.dynamics import descend, snapshot


def stream(N, B, T):
    "T full batches from epochs in random order, [T, B]"
    epochs = -(-T // (N // B))
    return torch.cat([torch.randperm(N, generator=generator(0, "order", e))[: N // B * B].view(-1, B) for e in range(epochs)])[:T]


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--N", type=int, default=2000, help="samples of the reference set")
    p.add_argument("--B", type=int, default=256, help="anchors of a batch")
    p.add_argument("--C", type=int, default=10, help="classes")
    p.add_argument("--T", type=int, default=1000, help="steps")
    p.add_argument("--threads", type=int, default=1, help="torch threads: the blocks are small, more than one gains little")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    y = torch.arange(a.N) % a.C
    z = torch.nn.functional.normalize(torch.randn(a.N, 32, generator=generator(0, "bench"), dtype=torch.float64), dim=1)
    batches, measuring = stream(a.N, a.B, a.T), 0.0
    begin, cpu = time.perf_counter(), time.process_time()
    for d in descend(z @ z.T, y, batches, 4.0, 0.5, every=max(1, a.T // 10)):
        t = time.perf_counter()
        rows = snapshot(d, y, a.B, a.T)
        measuring += time.perf_counter() - t
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    drift = (d.Sigma[0] - d.Sigma[1]).norm().item()
    print(f"N={a.N} B={a.B} T={a.T} threads={a.threads}: {wall:.1f} s wall, {cpu:.1f} s CPU; of it {measuring:.1f} s in 11 snapshots")
    print(f"drift {drift:.4g}, certificate by rows {d.c.norm().item() / drift:.2f} times, by steps {d.c_sum / drift:.2f} times; {len(rows)} numbers a snapshot")


if __name__ == "__main__":
    main()
