"Models: shared initialisation, shapes, evaluation that leaves no trace, weights that fit or are refused."
import os, subprocess, sys
from dataclasses import replace

import pytest, torch, torchvision
from torch import nn

from cl_nscl.core import Params, UserError, generator
from cl_nscl.models import ENCODERS, Twin, build_twin, evaluating, extract, load_weights, projector

torch.set_num_threads(1)
p8 = Params(encoder="resnet8", proj_hidden=32, proj_dim=16)

def images(M, ch, s, seed=0): return torch.rand(M, ch, s, s, generator=generator(seed, "x"))
def n_params(m): return sum(w.numel() for w in m.parameters())
def meta(name, channels, size, width=1.0):
    with torch.device("meta"): return ENCODERS[name](channels, size, width)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_the_imagenet_form_is_torchvisions_network(name):
    theirs = getattr(torchvision.models, name)()
    theirs.fc = nn.Identity()
    ours = ENCODERS[name](3, 224, 1.0)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    x = images(2, 3, 96)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.train()(x), theirs.train()(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name,channels,size,width,d", [
    ("resnet18", 3, 32, 1.0, 512), ("resnet18", 1, 28, 0.25, 128), ("resnet50", 3, 64, 1.0, 2048), ("resnet50", 3, 224, 0.5, 1024),
    ("resnet8", 1, 8, 1.0, 64), ("resnet8", 1, 16, 2.0, 128), ("resnet8", 4, 32, 0.5, 32), ("resnet8", 1, 4, 0.01, 4)])
def test_feature_dimension_follows_encoder_and_width(name, channels, size, width, d):
    f = meta(name, channels, size, width)
    assert f.feature_dim == d and f(torch.empty(3, channels, size, size, device="meta")).shape == (3, d)
    assert f.stem == ("imagenet" if size > 64 else "small")


def test_parameter_counts():
    full = n_params(torchvision.models.resnet18()) - 513_000                    # without fc
    assert n_params(meta("resnet18", 3, 224)) == full
    assert n_params(meta("resnet18", 3, 32)) == full - 64 * 3 * (49 - 9) == 11_168_832
    assert n_params(meta("resnet50", 3, 224)) == n_params(torchvision.models.resnet50()) - 2_049_000
    assert n_params(meta("resnet8", 3, 32)) == 77_392                           # 464 + 4,672 + 14,528 + 57,728 by hand


@pytest.mark.parametrize("size,side", [(32, 4), (28, 4), (64, 8)])
def test_D11_small_images_keep_a_map_before_pooling(size, side):
    f = meta("resnet18", 3, size)
    assert f.stem == "small" and f.maps(torch.empty(1, 3, size, size, device="meta")).shape[2:] == (side, side)

def test_D11_the_imagenet_stem_would_leave_one_pixel():
    big = meta("resnet18", 3, 224)
    assert big.stem == "imagenet" and big.maps(torch.empty(2, 3, 32, 32, device="meta")).shape[2:] == (1, 1)


def test_twins_of_one_seed_start_bit_equal_whatever_the_objective():
    twins = [build_twin(replace(p8, objective=o), channels=1, size=8, C=C) for o, C in [("cl", None), ("nscl", None), ("ce", 10), ("ce", 3)]]
    for t in twins[1:]:
        for k, v in twins[0].state_dict().items(): assert torch.equal(v, t.state_dict()[k]), k
    a, b = (build_twin(replace(p8, objective=o), channels=1, size=8, C=10) for o in ("ce", "cl"))
    assert torch.equal(a.head.weight, b.head.weight)


def test_R15_building_a_model_neither_fixes_nor_moves_the_random_state():
    draws, weights = [], []
    for seed in (1, 2):
        torch.manual_seed(100 + seed)
        expected = torch.rand(3)
        torch.manual_seed(100 + seed)
        m = build_twin(replace(p8, seed=seed), channels=1, size=8, C=3)
        draws.append(torch.rand(3)); weights.append(m.projector[0].weight.detach())
        assert torch.equal(draws[-1], expected)
    assert not torch.equal(*draws) and not torch.equal(*weights)

def test_initialisation_ignores_the_callers_state_and_default_device():
    torch.manual_seed(5); a = build_twin(p8, channels=1, size=8, C=3)
    torch.manual_seed(6)
    with torch.device("meta"): b = build_twin(p8, channels=1, size=8, C=3)
    for k, v in a.state_dict().items(): assert v.device == b.state_dict()[k].device and torch.equal(v, b.state_dict()[k])


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="needs a processor with AVX2")
def test_initialisation_is_the_same_on_processors_with_and_without_avx2():
    code = ("import hashlib; from cl_nscl.core import Params; from cl_nscl.models import build_twin; "
            "ms = [build_twin(Params(encoder=e, width=0.25, proj_hidden=64, proj_dim=16), channels=1, size=8, C=3) for e in ('resnet8', 'vit')]; "
            "print(hashlib.sha256(b''.join(v.numpy().tobytes() for m in ms for v in m.state_dict().values())).hexdigest())")
    out = [subprocess.run([sys.executable, "-c", code], env=os.environ | {"ATEN_CPU_CAPABILITY": c}, capture_output=True, text=True, check=True).stdout for c in ("default", "avx2")]
    assert out[0] == out[1] and len(out[0]) == 65


def test_R18_no_forward_at_construction():
    for m in build_twin(p8, channels=1, size=8, C=10).modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            assert m.num_batches_tracked == 0 and not m.running_mean.any() and torch.equal(m.running_var, torch.ones_like(m.running_var))


@pytest.mark.parametrize("encoder", ["resnet8", "resnet18", "resnet50"])
@pytest.mark.parametrize("C", [None, 5])
def test_P08_every_parameter_gets_a_gradient_and_unused_heads_are_absent(encoder, C):
    m = build_twin(replace(p8, encoder=encoder, width=0.25), channels=1, size=8, C=C)
    h, z = m(images(12, 1, 8))
    y = torch.arange(12) % 5
    if C: loss = nn.functional.cross_entropy(m.logits(z), y)
    else: # cosine of the two views against all others: what a contrastive loss needs
        s = nn.functional.normalize(z, dim=1); s = s @ s.T / 0.5
        loss = nn.functional.cross_entropy(s.masked_fill(torch.eye(12, dtype=bool), -torch.inf), torch.arange(12).roll(6))
    loss.backward()
    for k, w in m.named_parameters(): assert w.grad is not None and w.grad.isfinite().all() and w.grad.any(), k
    assert hasattr(m, "head") == bool(C) and any(k.startswith("head") for k in m.state_dict()) == bool(C)
    if not C:
        with pytest.raises(ValueError, match="no head"): m.logits(z)


def test_one_forward_of_all_views_is_not_one_forward_per_view():
    m = build_twin(p8, channels=1, size=8)
    x = torch.stack([images(6, 1, 8, 1), images(6, 1, 8, 2) * 0.3])              # [K, B, 1, 8, 8]
    together = m(x.flatten(0, 1))[1].view(2, 6, -1)
    apart = torch.stack([m(v)[1] for v in x])
    assert (together - apart).abs().max() > 0.1                                  # batch norm sees other rows
    back = m(x.flip(0).flatten(0, 1))[1].view(2, 6, -1).flip(0)
    torch.testing.assert_close(together, back, rtol=1e-4, atol=1e-4)             # but not their order


def test_E01_extraction_ignores_the_batch_and_leaves_no_trace():
    m = build_twin(p8, channels=1, size=8)
    m.train()(images(30, 1, 8, 3))                                               # buffers that are not the initial ones
    m.projector.eval(); m.encoder.layer2.eval()
    modes = [k.training for k in m.modules()]
    before = {k: v.numpy().tobytes() for k, v in m.named_buffers()}
    state, x = torch.get_rng_state(), images(8, 1, 8)
    alone, = extract(m, [x[:1]]); batch, = extract(m, iter([x])); back, = extract(m, [x.flip(0)])
    torch.testing.assert_close(alone, batch[:1], rtol=0, atol=1e-6)
    torch.testing.assert_close(back.flip(0), batch, rtol=0, atol=1e-6)
    assert torch.equal(batch, next(extract(m, [x])))
    assert {k: v.numpy().tobytes() for k, v in m.named_buffers()} == before
    assert [k.training for k in m.modules()] == modes and torch.equal(torch.get_rng_state(), state)

def test_E01_modes_are_restored_half_way_and_after_an_error():
    m = build_twin(p8, channels=1, size=8)
    feats = extract(m, [images(2, 1, 8)] * 3); h = next(feats)
    assert all(k.training for k in m.modules()) and torch.is_grad_enabled()
    nn.Linear(m.feature_dim, 2)(h).sum().backward()                              # features can be trained on
    with pytest.raises(RuntimeError): list(extract(m, [torch.zeros(2, 3, 8, 8)]))
    assert all(k.training for k in m.modules())
    with pytest.raises(KeyError), evaluating(m): raise KeyError
    assert all(k.training for k in m.modules())


def test_E11_a_wrong_prefix_is_refused_with_the_names_and_nothing_is_loaded():
    m, other = (build_twin(replace(p8, encoder="resnet18", width=0.125, seed=s), channels=1, size=8) for s in (0, 1))
    before = {k: v.clone() for k, v in m.state_dict().items()}
    for bad in ({f"backbone.{k}": v for k, v in other.state_dict().items()}, {k: v for k, v in other.state_dict().items() if "bn1" not in k},
                other.encoder.state_dict(), other.state_dict() | {"head.weight": torch.zeros(2)}, {"model": other.state_dict()}):
        with pytest.raises(ValueError, match="(missing|unexpected): ") as e: load_weights(m, bad)
        for k in set(bad) - set(m.state_dict()): assert k in str(e.value)
        for k in set(m.state_dict()) - set(bad): assert k in str(e.value)
        for k, v in m.state_dict().items(): assert torch.equal(v, before[k])
    wide = build_twin(replace(p8, encoder="resnet18", width=0.25), channels=1, size=8)
    with pytest.raises(ValueError, match=r"of another shape: encoder.conv1.weight \(16, 1, 3, 3\) for \(8, 1, 3, 3\)"): load_weights(m, wide.state_dict())

@pytest.mark.parametrize("wrap", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_orig_mod.module.{}"])
def test_E11_wrapper_prefixes_are_resolved(wrap):
    m, other = (build_twin(replace(p8, seed=s), channels=1, size=8) for s in (0, 1))
    other(images(9, 1, 8))
    load_weights(m, {wrap.format(k): v for k, v in other.state_dict().items()})
    for k, v in m.state_dict().items(): assert torch.equal(v, other.state_dict()[k])
    assert m.encoder.bn1.num_batches_tracked == 1

def test_E11_a_compiled_or_wrapped_model_takes_a_plain_state():
    m, other = (build_twin(replace(p8, seed=s), channels=1, size=8) for s in (0, 1))
    m.encoder = torch.compile(m.encoder)                                         # keys encoder._orig_mod.*
    load_weights(nn.DataParallel(m), other.state_dict())
    assert torch.equal(m.encoder._orig_mod.conv1.weight, other.encoder.conv1.weight)

def test_E11_the_default_feature_is_the_encoders():
    m = build_twin(replace(p8, encoder="resnet18"), channels=3, size=32)
    assert m.feature_dim == 512 and next(extract(m, [images(1, 3, 32)])).shape == (1, 512)


def test_an_encoder_of_ones_own_is_part_of_the_shared_initialisation():
    class Mine(nn.Module):
        feature_dim = 7
        def __init__(self, channels, size):
            super().__init__(); self.lin, self.drop = nn.Linear(channels * size**2, 7), nn.Dropout(0.5)
        def forward(self, x): return self.drop(self.lin(x.flatten(1)))
    ENCODERS["mine"] = lambda channels, size, width: Mine(channels, size)
    try:
        a, b = (build_twin(replace(p8, encoder="mine"), channels=2, size=5, C=C) for C in (None, 4))
        assert torch.equal(a.encoder.lin.weight, b.encoder.lin.weight) and torch.equal(a.projector[0].weight, b.projector[0].weight)
        x = images(4, 2, 5)
        assert torch.equal(next(extract(a, [x])), next(extract(a, [x])))         # no dropout in extraction
        ENCODERS["mine"] = lambda *a: nn.Identity()
        with pytest.raises(UserError, match=r"gives \[2, 2, 5, 5\] for images \[2, 2, 5, 5\]; it must give \[2, d\]"): build_twin(replace(p8, encoder="mine"), channels=2, size=5)
    finally: del ENCODERS["mine"]
    with pytest.raises(UserError, match="valid: resnet8, resnet18, resnet50, vit"): build_twin(replace(p8, encoder="vgg"), channels=2, size=5)


NETS = """
import torch
from torch import nn
def plain(channels, size): return nn.Sequential(nn.Conv2d(channels, 6, 3, bias=False), nn.BatchNorm2d(6), nn.AdaptiveAvgPool2d(1), nn.Flatten())
class Wide(nn.Module):
    def __init__(self, channels, width): super().__init__(); self.c = nn.Conv2d(channels, round(8 * width), 1)
    def forward(self, x): return self.c(x).mean((2, 3))
def tuple_of(): return type("T", (nn.Module,), dict(forward=lambda self, x: (x, x)))()
def maps(channels): return nn.Conv2d(channels, 4, 1)
def lies(channels):
    f = nn.Flatten(); f.feature_dim = 3
    return f
def picky(depth): return nn.Flatten()
def text(): return "resnet"
def fails(): return nn.Linear(3, 3)
ready = nn.Flatten()
"""

@pytest.fixture
def nets(tmp_path):
    (tmp_path/"my_nets.py").write_text(NETS)
    return tmp_path/"my_nets.py"


def test_a_network_of_ones_own_is_named_by_file_or_module_and_function(nets, monkeypatch):
    monkeypatch.syspath_prepend(str(nets.parent))
    for name in (f"{nets}:plain", "my_nets:plain"):
        a, b = (build_twin(replace(p8, encoder=name), channels=2, size=5, C=C) for C in (None, 4))
        assert a.feature_dim == 6 and all(map(torch.equal, a.encoder.parameters(), b.encoder.parameters())) and a.encoder[1].num_batches_tracked == 0   # R18
        assert not torch.equal(a.encoder[0].weight, build_twin(replace(p8, encoder=name, seed=1), channels=2, size=5).encoder[0].weight)
    assert build_twin(replace(p8, encoder="my_nets:Wide", width=2.0), channels=2, size=5).feature_dim == 16
    assert build_twin(replace(p8, encoder="torchvision.models:squeezenet1_1"), channels=3, size=64).feature_dim == 1000


@pytest.mark.parametrize("name, says", [
    ("tuple_of", "gives tuple for images"), ("maps", r"gives \[2, 4, 5, 5\] for images"), ("lies", "says feature_dim = 3, but gives .2, 50."), ("picky", "cannot be made .*'depth'.*channels, size, width"),
    ("text", "made a str, not an nn.Module"), ("fails", r"fails on images \[2, 2, 5, 5\]"), ("ready", "no function or class 'ready'"), ("nothing", "no function or class 'nothing'")])
def test_a_network_that_gives_no_features_is_refused_in_one_line(nets, name, says):
    with pytest.raises(UserError, match=says) as e: build_twin(replace(p8, encoder=f"{nets}:{name}"), channels=2, size=5)
    assert "\n" not in str(e.value)


def test_the_code_of_a_network_of_ones_own_is_part_of_the_runs_name(nets):
    from cl_nscl.core import run_id
    from cl_nscl.plan import layered, study, twins_of
    of = lambda: study(layered("digits", "smoke", encoder=f"{nets}:plain"))
    a = of()
    assert a.plugins == (str(nets),) and len(twins_of(a, 0)) == 4
    before = run_id(twins_of(a, 0)[0])
    nets.write_text(NETS.replace("6", "7"))
    assert run_id(twins_of(of(), 0)[0]) != before
    with pytest.raises(UserError, match="no such file or module"): study(layered("digits", encoder="no_such_nets:net"))


@pytest.mark.parametrize("size, patch, d, tokens", [(32, 4, 384, 64), (64, 8, 384, 64), (224, 16, 768, 196)])
def test_the_vision_transformer_has_the_published_size(size, patch, d, tokens):
    f = meta("vit", 3, size)
    layer = 4 * d * d + 4 * d + 2 * 4 * d * d + 5 * d + 4 * d                     # attention, perceptron, two norms
    assert n_params(f) == (3 * patch**2 + 1) * d + (tokens + 1) * d + d + 12 * layer + 2 * d
    assert f.feature_dim == d and f.stem == f"patch {patch}" and f(torch.empty(2, 3, size, size, device="meta")).shape == (2, d)
    if size == 224: assert n_params(f) == n_params(torchvision.models.vit_b_16()) - 769_000
    assert len(f.encoder.layers) == 12 and f.encoder.layers[0].self_attention.num_heads == 12 and f.encoder.layers[0].mlp[0].out_features == 4 * d


def test_the_vision_transformer_is_torchvisions_network():
    from torchvision.models.vision_transformer import VisionTransformer
    theirs = VisionTransformer(32, 4, 12, 12, 96, 384, num_classes=1)
    theirs.heads = nn.Identity()
    ours = ENCODERS["vit"](3, 32, 0.25)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad(): torch.testing.assert_close(ours.eval()(images(2, 3, 32)), theirs.eval()(images(2, 3, 32)))


@pytest.mark.parametrize("encoder, size, d", [("resnet18", 32, 512), ("resnet50", 32, 2048), ("vit", 32, 384), ("resnet18", 224, 512), ("resnet50", 224, 2048), ("vit", 224, 768)])
def test_the_papers_projector_is_2048_2048_128(encoder, size, d):
    f = meta(encoder, 3, size)
    with torch.device("meta"): g = projector(f.feature_dim, 2048, 128)
    assert g(f(torch.empty(2, 3, size, size, device="meta"))).shape == (2, 128) and n_params(g) == d * 2048 + 2 * 2048 + 2048 * 128 + 2 * 128


def test_a_grey_vision_transformer_trains():
    m = build_twin(replace(p8, encoder="vit", width=0.1), channels=1, size=8)
    m(images(4, 1, 8))[1].square().sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in m.parameters())
