"""Views: torchvision's pixels and distribution, and nothing but image and row."""
import pytest, torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from cl_nscl.core import Params
from cl_nscl.data import batches, load_dataset, loader
from cl_nscl.views import COLUMNS, N_UNIFORMS, ViewSpec, crop_box, eval_view, jitter_values, one_view, uniforms, view_spec, views

torch.set_num_threads(1)
FULL = ViewSpec(32, blur=0.5, mean=(0.5, 0.4, 0.6), std=(0.2, 0.3, 0.25))


def images(n, channels=3, H=32, W=32, seed=0):
    "Smooth random images with some black, white and grey pixels."
    x = torch.rand(n, channels, 5, 5, generator=torch.Generator().manual_seed(seed)) * 1.4 - 0.2
    x = torch.nn.functional.interpolate(x, (H, W), mode="bicubic").clamp(0, 1)
    x[:, :, :3, :3] = x[:, :1, :3, :3]
    return (255 * x).round().to(torch.uint8)


def reference(x, u, spec):
    "One view of one image by torchvision's functions, one after the other, with the parameters of the row `u`."
    col = {k: u[c] for k, c in COLUMNS.items()}
    z = F.resized_crop(x.float() / 255, *crop_box(u[None], *x.shape[1:], spec.crop)[0].tolist(), [spec.size, spec.size], antialias=True)
    if col["flip"] < spec.flip: z = F.horizontal_flip(z)
    order, a = (t[0] for t in jitter_values(u[None], spec))
    for op in order.tolist():
        if op >= 0: z = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)[op](z, a[op].item())
    if col["grey"] < spec.grey and len(z) == 3: z = F.rgb_to_grayscale(z, 3)
    k = 2 * (spec.size // 20) + 1
    if col["blur"] < spec.blur and k > 1: z = F.gaussian_blur(z, [k, k], [0.1 + 1.9 * col["sigma"].item()] * 2)
    return F.normalize(z, spec.mean, spec.std)


@pytest.mark.parametrize("size, H, W, channels", [(32, 32, 32, 3), (32, 8, 8, 1), (28, 28, 28, 1), (40, 64, 50, 3), (16, 48, 48, 3)])
def test_views_are_torchvisions_pixels(size, H, W, channels):
    x, u = images(60, channels, H, W), uniforms(0, 0, 60, 2)
    spec = ViewSpec(size, blur=0.5, mean=(0.0,) * channels, std=(1.0,) * channels)
    z = views(x, u, spec)
    loop = torch.stack([torch.stack([reference(i, r[k], spec) for i, r in zip(x, u)]) for k in range(2)])
    assert (z - loop).abs().max() < 1e-5


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("size, H, W, channels, n", [(32, 32, 32, 3, 200), (32, 8, 8, 1, 150), (33, 31, 29, 3, 20), (224, 224, 230, 3, 2)])
def test_a_view_is_bit_identical_in_any_company(size, H, W, channels, n, threads):
    before = torch.get_num_threads(); torch.set_num_threads(threads)
    try:
        x, u = images(n, channels, H, W), uniforms(0, 0, n, 2)
        spec = ViewSpec(size, blur=0.5, mean=(0.5,) * channels, std=(0.2,) * channels)
        z, e, j = views(x, u, spec), eval_view(x, spec), torch.randperm(n, generator=torch.Generator().manual_seed(0))
        assert views(x[j], u[j], spec).equal(z[:, j])
        assert views(x[-n // 3:], u[-n // 3:], spec).equal(z[:, -n // 3:])
        for i in range(0, n, max(1, n // 10)):
            assert views(x[i:i + 1], u[i:i + 1], spec)[:, 0].equal(z[:, i]) and eval_view(x[i:i + 1], spec)[0].equal(e[i])
            assert views(x[i:i + 1], u[i:i + 1, 1:], spec)[0, 0].equal(z[1, i])    # nor does a view depend on the other views
    finally: torch.set_num_threads(before)


@pytest.mark.parametrize("size, H, W, channels, n", [(32, 32, 32, 3, 200), (32, 8, 8, 1, 150), (40, 64, 50, 3, 40), (16, 20, 20, 3, 60)])
@pytest.mark.parametrize("change", [{}, dict(blur=0.0, hue=0.0), dict(jitter=1.0, blur=1.0), dict(jitter=0.0, grey=1.0)])
def test_the_branch_of_a_gpu_gives_the_same_bits(size, H, W, channels, n, change):
    "All samples through all operations, each keeping its own: no index that the host would have to wait for."
    x, u = images(n, channels, H, W), uniforms(0, 0, n, 1)[:, 0]
    spec = ViewSpec(size, **dict(blur=0.5) | change, mean=(0.5,) * channels, std=(0.2,) * channels)
    assert one_view(x, u, spec, masked=True).equal(one_view(x, u, spec, masked=False))


def test_views_read_their_row_and_change_nothing():
    x, u = images(20), uniforms(0, 0, 20, 2)
    x0, u0, state = x.clone(), u.clone(), torch.get_rng_state()
    z = views(x, u, FULL)
    assert x.equal(x0) and u.equal(u0) and torch.get_rng_state().equal(state) and views(x, u, FULL).equal(z)
    u[3, 0] = torch.rand(N_UNIFORMS, generator=torch.Generator().manual_seed(9))
    changed = (views(x, u, FULL) != z).flatten(2).any(2).nonzero().tolist()
    assert changed == [[0, 3]]
    wide = torch.empty(20, 2, 40)[:, :, :N_UNIFORMS].copy_(u0)                    # layout in memory does not matter
    assert views(x.contiguous(memory_format=torch.channels_last), wide, FULL).equal(z)


def test_R09_workers_give_identical_views_for_each_seed_epoch_and_index():
    ds = load_dataset("digits", n_train=200)
    spec = view_spec(Params(size=8), ds)
    def run(seed, epoch, workers, B=30):
        u, out = uniforms(seed, epoch, 200, 2), {}
        for i, x, _ in loader(ds.train, batches(seed, epoch, 200, B), workers):
            out |= dict(zip(i.tolist(), views(x, u[i], spec).unbind(1)))
        return out
    a = run(0, 1, 0)
    for other in (run(0, 1, 1), run(0, 1, 2)): assert a.keys() == other.keys() and all(a[i].equal(other[i]) for i in a)
    smaller = run(0, 1, 0, B=7)
    assert all(a[i].equal(smaller[i]) for i in a.keys() & smaller.keys())          # nor the size of the batch
    for other in (run(0, 2, 0), run(1, 1, 0)): assert not any(a[i].equal(other[i]) for i in a.keys() & other.keys())


def test_uniforms_of_an_epoch_need_no_earlier_epoch_and_no_global_generator():
    state = torch.get_rng_state()
    late = uniforms(3, 7, 50, 2)
    for e in range(7): uniforms(3, e, 50, 2)
    assert uniforms(3, 7, 50, 2).equal(late) and torch.get_rng_state().equal(state)
    assert late.dtype == torch.float32 and 0 <= late.min() and late.max() < 1


def test_D12_the_evaluation_view_holds_no_randomness():
    for name in ("digits", "textures"):
        ds = load_dataset(name, n_train=40, size=16)
        spec = view_spec(Params(size=16), ds)
        a = eval_view(ds.train.x, spec)
        assert a.equal(eval_view(ds.train.x, spec)) and (a - F.normalize(ds.train.x / 255, ds.mean, ds.std)).abs().max() < 2e-6
    x = images(10, 3, 48, 40)
    assert (eval_view(x, ViewSpec(32)) - F.resize(x / 255, [32, 32], antialias=True)).abs().max() < 1e-5


def test_no_augmentation_is_the_evaluation_view():
    x, u = images(30), uniforms(0, 0, 30, 2)
    off = ViewSpec(32, crop=1, flip=0, jitter=0, grey=0, mean=FULL.mean, std=FULL.std)
    box = crop_box(u.flatten(0, 1), 32, 32, 1.0).unflatten(0, (30, 2))
    whole = (box == torch.tensor([0, 0, 32, 32])).all(2)
    z, e = views(x, u, off), eval_view(x, off)
    assert whole.any() and all(z[k, i].equal(e[i]) for i in range(30) for k in range(2) if whole[i, k])
    none = ViewSpec(32, brightness=0, contrast=0, saturation=0, hue=0, jitter=1, flip=0, grey=0, crop=0.2)
    assert views(x, u, none).equal(views(x, u, ViewSpec(32, flip=0, jitter=0, grey=0)))


def test_saturation_hue_and_grey_leave_one_channel_alone():
    x, u = images(40, 1), uniforms(0, 0, 40, 2)
    one = dict(mean=(0.5,), std=(0.2,))
    assert views(x, u, ViewSpec(32, grey=1, saturation=0.9, hue=0.5, **one)).equal(views(x, u, ViewSpec(32, grey=0, saturation=0, hue=0, **one)))


@pytest.mark.parametrize("H, W, crop", [(32, 32, 0.2), (32, 32, 0.9), (32, 32, 1.0), (20, 60, 0.5)])
def test_crops_have_torchvisions_distribution(H, W, crop):
    ours = crop_box(uniforms(0, 0, 20_000, 1)[:, 0], H, W, crop).double()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draw, x = v2.RandomResizedCrop(32, scale=(crop, 1.0)), torch.zeros(1, H, W)
        theirs = torch.tensor([list(draw.make_params([x]).values()) for _ in range(4000)]).double()      # top, left, height, width
    error = (ours.var(0) / len(ours) + theirs.var(0) / len(theirs)).sqrt() + 1e-9
    assert ((ours.mean(0) - theirs.mean(0)).abs() < 4 * error).all()
    for q in (0.1, 0.5, 0.9): assert ((ours.quantile(q, 0) - theirs.quantile(q, 0)).abs() <= 1).all()    # whole pixels
    whole = lambda b: (b[:, 2] * b[:, 3] == H * W).double().mean()
    assert abs(whole(ours) - whole(theirs)) < 0.03


def test_views_have_the_moments_of_torchvisions_pipeline():
    x, n = images(1, seed=4), 6000
    spec = ViewSpec(32, blur=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = v2.Compose([v2.RandomResizedCrop(32, scale=(0.2, 1.0)), v2.RandomHorizontalFlip(), v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                               v2.RandomGrayscale(0.2), v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], p=0.5)])
        theirs = torch.stack([pipeline(x[0] / 255) for _ in range(n // 3)])
    ours = views(x.expand(n, -1, -1, -1), uniforms(0, 0, n, 1), spec)[0]
    def stats(z):  # [n, ...] -> [n, features]: channel means, spread, saturation, sharpness, left against right, range
        grey = z.mean(1)
        return torch.stack([*z.mean((2, 3)).unbind(1), z.flatten(1).std(1), (z.amax(1) - z.amin(1)).mean((1, 2)), (grey[:, :, 1:] - grey[:, :, :-1]).abs().mean((1, 2)),
                            grey[:, :, :16].mean((1, 2)) - grey[:, :, 16:].mean((1, 2)), z.flatten(1).amax(1), z.flatten(1).amin(1)], 1).double()
    a, b = stats(ours), stats(theirs)
    assert ((a.mean(0) - b.mean(0)).abs() < 4 * (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()).all()
    assert ((a.std(0) / b.std(0) - 1).abs() < 0.1).all()
    assert abs((a[:, 4] < 1e-6).double().mean() - 0.2) < 0.03                      # the share of grey images


def test_each_sample_has_its_own_order_uniform_among_the_24():
    order, _ = jitter_values(uniforms(0, 0, 24_000, 1)[:, 0], ViewSpec(32, jitter=1))
    kinds, n = order.unique(dim=0, return_counts=True)
    assert len(kinds) == 24 and ((n - 1000).abs() < 5 * 1000**0.5).all()


@pytest.mark.parametrize("x, u, says", [
    (torch.zeros(4, 3, 8, 8), torch.zeros(4, 2, 32), "x: must be uint8"), (torch.zeros(4, 2, 8, 8, dtype=torch.uint8), torch.zeros(4, 2, 32), "1 or 3"),
    (torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4, 2, 32), "1 channels, but the mean 3"),
    (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(3, 2, 32), r"u: must be \[4, K, 32\]"), (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, 2, 31), "u: must be")])
def test_bad_input_is_refused(x, u, says):
    with pytest.raises(ValueError, match=says): views(x, u, ViewSpec(8))


def test_extreme_rows_stay_finite_and_within_range():
    x = torch.cat([images(4), torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.full((1, 3, 32, 32), 255, dtype=torch.uint8)])
    hot = ViewSpec(32, brightness=1, contrast=1, saturation=1, hue=0.5, jitter=1, blur=1, crop=0.01)
    for v in (0.0, 0.5, 1 - 2**-24):
        z = views(x, torch.full((6, 2, 32), v), hot)
        assert z.isfinite().all() and z.min() >= -1e-6 and z.max() <= 1 + 1e-6


@pytest.mark.slow
def test_a_small_network_learns_the_classes_of_textures_from_views():
    ds = load_dataset("textures", n_train=6000)
    spec = view_spec(Params(), ds)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = lambda i, o, stride: [torch.nn.Conv2d(i, o, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(o), torch.nn.ReLU()]
        net = torch.nn.Sequential(*block(3, 16, 1), *block(16, 32, 2), *block(32, 64, 2), *block(64, 64, 2), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(64, 20))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        u = uniforms(0, epoch, 6000, 1)
        for i, x, y in loader(ds.train, batches(0, epoch, 6000, 128)):
            optimizer.zero_grad(); torch.nn.functional.cross_entropy(net(views(x, u[i], spec)[0]), y).backward(); optimizer.step()
    net.eval()
    with torch.no_grad(): right = net(eval_view(ds.test.x, spec)).argmax(1) == ds.test.y
    assert right.double().mean() > 0.3                                           # chance is 0.05
