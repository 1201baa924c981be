"""The weight gap: known faults, wrappers, refusals, and properties that hold for any weights."""
import copy, warnings

import pytest, torch
from hypothesis import given, settings, strategies as st
from torch import nn

from cl_nscl.core import Params, generator
from cl_nscl.models import build_twin
from cl_nscl.weights import mean_weight_gap, weight_gap

P = Params(size=8, width=0.125, proj_hidden=8, proj_dim=4)
gap = lambda w, v: weight_gap({"w": torch.tensor([w])}, {"w": torch.tensor([v])}).gap.tolist()


def twin(C=None, p=P): return build_twin(p, channels=1, size=8, C=C)


def moved(m, seed=1):
    m = copy.deepcopy(m)
    with torch.no_grad():
        for i, w in enumerate(m.parameters()): w += 0.1 * torch.randn(w.shape, generator=generator(seed, "moved", i))
    return m


def test_M19_twins_at_step_0_have_no_gap():
    "Shared initialisation: exactly 0 on every layer, with and without a head, as modules and as state dicts."
    cl, ce = twin(), twin(C=3)
    assert mean_weight_gap(cl.encoder, ce.encoder) == 0
    assert (weight_gap(cl, ce.state_dict(), vectors=True).gap == 0).all()


def test_M25_one_layer_zero_is_2():
    assert gap([3., 4.], [0., 0.]) == [2.0]
    assert gap([0., 0.], [3., 4.]) == [2.0]


def test_M25_identical_layers_are_0(): assert gap([3., 4.], [3., 4.]) == [0.0]


def test_M25_layers_zero_in_both_are_left_out_with_a_count():
    a, b = {"w": torch.ones(1, 2), "o": torch.zeros(2, 2)}, {"w": -torch.ones(1, 2), "o": torch.zeros(2, 2)}
    table = weight_gap(a, b)
    assert table.layer.tolist() == ["w"] and table.attrs["both_zero"] == ["o"]
    with pytest.warns(UserWarning, match="1 of 2 layers zero in both models, left out of the mean: o"): assert mean_weight_gap(a, b) == 2.0
    with pytest.raises(ValueError, match="every layer is zero"): mean_weight_gap({"o": a["o"]}, {"o": b["o"]})


@pytest.mark.parametrize("wrap", [
    lambda k: "module." + k, lambda k: "_orig_mod." + k, lambda k: "module._orig_mod." + k, lambda k: "module.module." + k,
    lambda k: k.replace("encoder.", "encoder.module."), lambda k: k.replace("encoder.layer1.", "encoder.layer1._orig_mod.")])
def test_M25_prefixes_of_wrappers_are_resolved(wrap):
    "The cross-entropy twin, wrapped, against the plain encoder."
    cl, ce = twin(), moved(twin(C=3))
    want = weight_gap(cl.encoder, ce.encoder)
    assert weight_gap(cl.encoder, {wrap(k): w for k, w in ce.state_dict().items()}).equals(want)
    assert 0 < want.gap.min() and want.gap.max() < 2


def test_M25_an_unknown_prefix_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError, match="only a has w; only b has backbone.w"): weight_gap({"w": torch.ones(1, 2)}, {"backbone.w": torch.ones(1, 2)})


def test_M25_the_average_is_a_mean_over_layers_not_a_sum():
    a = {"small": torch.ones(1, 2), "large": torch.ones(9, 9)}
    b = {"small": -torch.ones(1, 2), "large": torch.ones(9, 9)}
    assert mean_weight_gap(a, b) == 1.0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.floats(-4, 4), st.floats(1e-6, 1e6))
def test_M25_the_gap_lies_in_0_to_2_and_knows_no_order_or_common_scale(seed, lean, scale):
    g = generator(seed, "gap")
    w, e = torch.randn(3, 4, generator=g), torch.randn(3, 4, generator=g)
    a, b = {"w": w}, {"w": lean * w + e}
    value = mean_weight_gap(a, b)
    assert 0 <= value <= 2
    assert mean_weight_gap(b, a) == value
    assert mean_weight_gap({"w": scale * w}, {"w": scale * b["w"]}) == pytest.approx(value, rel=1e-5)
    assert mean_weight_gap(a, {"w": -w}) == 2


def test_layers_are_the_convolutions_and_linear_maps_of_the_encoder():
    m = twin(C=3)
    want = [f"{n}.weight" for n, l in m.encoder.named_modules() if isinstance(l, (nn.Conv2d, nn.Linear))]
    assert weight_gap(m, moved(m)).layer.tolist() == want
    assert set(weight_gap(m, moved(m), vectors=True).layer) == {n for n, _ in m.encoder.named_parameters()}


def test_buffers_never_count():
    a, b = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    b.running_mean += 5; b.num_batches_tracked += 7
    for x, y in ((a, b), (a.state_dict(), b.state_dict())): assert weight_gap(x, y, vectors=True).layer.tolist() == ["weight"] and mean_weight_gap_quiet(x, y) == 0


def mean_weight_gap_quiet(a, b):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mean_weight_gap(a, b, vectors=True)


def test_a_layer_of_its_own_named_encoder_is_kept_whole():
    "A transformer has blocks under `encoder.` beside other layers: nothing of it may be dropped."
    a = {"conv_proj.weight": torch.ones(2, 2), "encoder.block.weight": torch.ones(2, 2)}
    b = {"conv_proj.weight": -torch.ones(2, 2), "encoder.block.weight": torch.ones(2, 2)}
    assert mean_weight_gap(a, b) == 1.0


def test_small_differences_survive():
    "float32 weights that differ in one part in a million; also half precision and mixed types."
    w = torch.randn(64, 64, generator=generator(0, "w"))
    assert mean_weight_gap({"w": w}, {"w": w.double() * (1 + 1e-9)}) == pytest.approx(1e-9, rel=1e-5)
    assert mean_weight_gap({"w": w.bfloat16()}, {"w": w.bfloat16().float()}) == 0


@pytest.mark.parametrize("a, b, message", [
    ({"w": torch.ones(2, 2)}, {"w": torch.ones(2, 3)}, r"different shapes: w \(2, 2\) and \(2, 3\)"),
    ({"w": torch.ones(2, 2)}, {"w": torch.full((2, 2), float("nan"))}, "layer w holds NaN or inf"),
    ({"w": torch.full((2, 2), float("inf"))}, {"w": torch.full((2, 2), float("inf"))}, "layer w holds NaN or inf"),
    ({"b": torch.ones(2)}, {"b": torch.ones(2)}, "no layers to compare"),
    ({"state_dict": {"w": 1}}, {"w": torch.ones(2, 2)}, "not a tensor: pass the state dict itself"),
    (7, {"w": torch.ones(2, 2)}, "nn.Module or a state dict, not int"),
    ({"w": torch.ones(2, 2), "module.w": torch.ones(2, 2)}, {"w": torch.ones(2, 2)}, "one name"),
])
def test_what_cannot_be_compared_is_refused(a, b, message):
    with pytest.raises(ValueError, match=message): weight_gap(a, b)


def test_inputs_stay_as_they_are():
    m = twin()
    before = {k: w.clone() for k, w in m.state_dict().items()}
    weight_gap(m, moved(m))
    assert all(torch.equal(w, before[k]) for k, w in m.state_dict().items()) and all(w.requires_grad for w in m.parameters())
