"""CKA, RSA and drift of two models: this package beside N x N code and installed peers.

python bench/similarity.py [rounds] [threads]      one interleaved run, a markdown table on stdout
python bench/similarity.py full                    one pass at N = 1,281,167, d = 2,048, synthetic and streamed

Each measurement is a process of its own, so that its peak memory is its own. Peers are optional: what is not installed
is left out. Features are made in place: h2 = h1 + noise, float32, ReLU, so all similarities are positive as in practice.
"""
import json, os, platform, resource, statistics, subprocess, sys, time

import torch

SIZES = [(1_000, 512), (4_000, 1_024), (10_000, 2_048), (20_000, 2_048)]


def features(N, d):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, d, generator=g)
    return torch.relu(x), torch.relu(x.add_(torch.randn(N, d, generator=g), alpha=0.7))


def unit(h): return h / h.norm(dim=1, keepdim=True)


def ours(h1, h2, products=None):
    from cl_nscl.similarity import Similarity
    sim = Similarity(["a", "b"], ("cosine",), products)
    sim.update([h1, h2])
    v = sim.result().pairs().set_index("metric").value
    return {m: v[m] for m in ("cka", "cka_debiased", "rsa", "drift")}


def rsa_direct(S1, S2):
    i = torch.triu_indices(len(S1), len(S1), 1)
    return float(torch.corrcoef(torch.stack([1 - S1[i[0], i[1]], 1 - S2[i[0], i[1]]]))[0, 1])


def direct(h1, h2):
    "N x N in float32 as it is usually published: H K H by matrix products, dissimilarities by indices."
    S1, S2 = unit(h1) @ unit(h1).T, unit(h2) @ unit(h2).T
    H = torch.eye(len(h1)) - 1 / len(h1)
    K, L = H @ S1 @ H, H @ S2 @ H
    cka = float((K * L).sum() / (K * K).sum().sqrt() / (L * L).sum().sqrt())
    del H, K, L
    return {"cka": cka, "rsa": rsa_direct(S1, S2), "drift": float((S1 - S2).norm())}


def lean(h1, h2):
    "N x N in float32, centred by subtracting means."
    S1, S2 = unit(h1) @ unit(h1).T, unit(h2) @ unit(h2).T
    out = {"drift": float((S1 - S2).norm()), "rsa": rsa_direct(S1, S2)}
    for S in (S1, S2): S.sub_(S.mean(0)).sub_(S.mean(1, keepdim=True))
    return out | {"cka": float((S1 * S2).sum() / (S1 * S1).sum().sqrt() / (S2 * S2).sum().sqrt())}


def feature_space(h1, h2):
    "CKA from d x d products in float32, centred features."
    x, y = [u - u.mean(0) for u in (unit(h1), unit(h2))]
    return {"cka": float((x.T @ y).square().sum() / (x.T @ x).norm() / (y.T @ y).norm())}


def rsa_nxn(h1, h2):
    "RSA alone, N x N in float32."
    return {"rsa": rsa_direct(unit(h1) @ unit(h1).T, unit(h2) @ unit(h2).T)}


def ckatorch(h1, h2):
    from ckatorch.core import cka_base
    return {"cka": float(cka_base(unit(h1), unit(h2)))}


def pytorch_cka(h1, h2):
    from cka.cka import cka_from_features
    return {"cka_debiased": float(cka_from_features(unit(h1), unit(h2)))}


def rsatoolbox(h1, h2):
    import numpy as np
    from rsatoolbox.rdm import RDMs, compare
    a, b = [RDMs(np.asarray(1 - unit(h) @ unit(h).T)[None][:, *np.triu_indices(len(h), 1)]) for h in (h1, h2)]
    return {"rsa": float(compare(a, b, "corr")[0, 0])}


def exact(h1, h2, step=500):
    "Float64, N x N in blocks of rows: the values to compare with."
    u = [unit(h.double()) for h in (h1, h2)]
    q, N = [x.mean(0) for x in u], len(h1)
    row = [x @ m for x, m in zip(u, q)]
    mean = [float(((m @ m) * N * N - N) / (N * (N - 1))) for m in q]
    kk, ab, drift2 = [torch.zeros(3, dtype=torch.float64) for _ in range(3)]
    for i in range(0, N, step):
        S = [x[i:i + step] @ x.T for x in u]
        K = [s - r - r[i:i + step, None] + m @ m for s, r, m in zip(S, row, q)]
        D = [s - m for s, m in zip(S, mean)]
        for d in D: d[torch.arange(len(d)), i + torch.arange(len(d))] = 0
        for n, (x, y) in enumerate(((0, 1), (0, 0), (1, 1))):
            kk[n] += (K[x] * K[y]).sum()
            ab[n] += (D[x] * D[y]).sum()
        drift2 += (S[0] - S[1]).square().sum()
    return {"cka": float(kk[0] / (kk[1] * kk[2]).sqrt()), "rsa": float(ab[0] / (ab[1] * ab[2]).sqrt()), "drift": float(drift2[0].sqrt())}


METHODS = {  # name -> (function, largest N)
    "cl_nscl, one pass": (ours, 10**9), "direct N x N": (direct, 10_000), "lean N x N": (lean, 20_000), "RSA alone, N x N": (rsa_nxn, 10_000),
    "CKA alone, d x d float32": (feature_space, 10**9), "ckatorch cka_base": (ckatorch, 10_000), "pytorch-cka": (pytorch_cka, 20_000),
    "rsatoolbox compare": (rsatoolbox, 10_000)}


def one(name, N, d, threads):
    "Measure one method in this process."
    torch.set_num_threads(threads)
    h1, h2 = features(N, d)
    METHODS[name][0](*features(64, 16))                                   # imports and first-call costs
    def resident(key): return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) / 1024
    open("/proc/self/clear_refs", "w").write("5")                         # the peak starts from here
    before, held = resource.getrusage(resource.RUSAGE_SELF), resident("VmRSS")
    start = time.perf_counter()
    value = METHODS[name][0](h1, h2)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps(dict(wall=wall, cpu=cpu, peak=resident("VmHWM") - held, value=value)))


def run(*args):
    done = subprocess.run([sys.executable, __file__, "one", *map(str, args)], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def table(rounds, threads):
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    print(f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}, float32 features; medians of {rounds} interleaved rounds (one at N = 20,000 and for what takes over 30 s).")
    print("Seconds depend on what else ran, CPU seconds of one thread hardly do: ratios are of CPU seconds, to `cl_nscl, one pass`. Error: largest absolute one of CKA and RSA, relative one of drift, against float64 (N x N in blocks up to N = 10,000).\n")
    print("| N, d | method | seconds | CPU s | ratio | extra MB | CKA | debiased | RSA | drift | error |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for N, d in SIZES:
        torch.set_num_threads(2)
        truth = ours(*features(N, d), torch.float64)
        if N <= 10_000: truth |= exact(*features(N, d))
        many = rounds if N < 20_000 else 1
        runs = {name: [] for name, (_, top) in METHODS.items() if N <= top}
        for _ in range(many):
            for name, rs in runs.items():
                if not rs or rs[-1] and rs[-1]["cpu"] < 30: rs.append(run(name, N, d, threads))
        base = statistics.median(r["cpu"] for r in runs["cl_nscl, one pass"])
        for name, rs in runs.items():
            rs = [r for r in rs if r]
            if not rs: continue
            wall, cpu, peak = (statistics.median(r[k] for r in rs) for k in ("wall", "cpu", "peak"))
            value = rs[0]["value"]
            error = max(abs(value[m] - truth[m]) / (truth[m] if m == "drift" else 1) for m in value)
            shown = [f"{value[m]:.6f}" if m in value else "" for m in ("cka", "cka_debiased", "rsa", "drift")]
            print(f"| {N:,}, {d:,} | {name} | {wall:.2f} | {cpu:.2f} | {cpu / base:.1f} | {peak:.0f} | {' | '.join(shown)} | {error:.0e} |", flush=True)


def full(N=1_281_167, d=2_048, chunk=4_096):
    "The size of the ImageNet-1K training set, two models, from streamed chunks."
    from cl_nscl.similarity import Similarity
    torch.set_num_threads(2)
    pool = [torch.relu(torch.randn(chunk, d, generator=torch.Generator().manual_seed(i))) for i in range(5)]
    sim, start = Similarity(["a", "b"], ("cosine",)), time.perf_counter()
    for t, i in enumerate(range(0, N, chunk)):
        n, x = min(chunk, N - i), pool[t % 5] + (t % 7) * pool[(t + 1) % 5]
        sim.update([x[:n], (x + pool[(t + 2) % 5])[:n]])
        if t % 50 == 0: print(f"{i + n:,} rows, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    v = sim.result().pairs().set_index("metric").value
    use = resource.getrusage(resource.RUSAGE_SELF)
    print(f"\nOne pass at N = {N:,}, d = {d:,}, two models, two threads: {time.perf_counter() - start:.0f} s wall, {use.ru_utime + use.ru_stime:.0f} s CPU, "
          f"{use.ru_maxrss / 1024:.0f} MB peak in all; CKA {v['cka']:.6f}, RSA {v['rsa']:.6f}, drift {v['drift']:.1f}.")


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else "3"
    if command == "one": one(sys.argv[2], *map(int, sys.argv[3:]))
    elif command == "full": full()
    else: table(int(command), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
