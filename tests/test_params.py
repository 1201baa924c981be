"""Parameter files of any content: every bad one is refused before anything trains, with the file, the name and what would be valid; every good one survives a round trip."""
import dataclasses, json, math, typing

import pytest, yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from cl_nscl.core import Params, UserError, parse_yaml, read_yaml, run_id
from cl_nscl.plan import STUDY_FIELDS, Study, layered, study, study_values
from cl_nscl.run import main
from cl_nscl.train import setting as parsed

FIELDS = {f.name: f for f in STUDY_FIELDS}
PATHS = {"plugins", "root", "out", "runs", "dataset", "encoder", "optimizer", "objectives", "device", "experiments", "compare"} # words that name other things: each has its own test
PLAIN = sorted(FIELDS.keys() - PATHS)
fuzz = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
scalars = st.one_of(st.integers(), st.integers(-3, 300), st.floats(), st.floats(0, 2), st.booleans(), st.none(), st.text(max_size=8), st.sampled_from(["cross", "linear", "3e-4", "1_000", "0x10", "yes", "~", "1e400", "-0.0"]))
values = st.one_of(scalars, st.lists(scalars, max_size=4), st.dictionaries(st.text(max_size=3), scalars, max_size=2))


def valid(f, v): # an independent reading of what a field takes
    kind, m = f.type, f.metadata
    if item := typing.get_args(kind):
        swept = {"taus": lambda i: 0 < i < math.inf, "batch_sizes": lambda i: i >= 2, "class_counts": lambda i: i >= 2}.get(f.name, lambda i: True)
        return isinstance(v, tuple) and all(type(i) is item[0] and swept(i) for i in v) and (f.name == "classes" or len(set(v)) == len(v))
    if type(v) is not kind: return False
    if kind is str: return not m["choices"] or v in m["choices"]
    return math.isfinite(v) and (m["lo"] is None or v >= m["lo"]) and (m["hi"] is None or v <= m["hi"]) and (m["above"] is None or v > m["above"]) and abs(v) < 2**63 * (1 if kind is int else math.inf)


@given(found=st.dictionaries(st.sampled_from([*PLAIN, "tua", "lrr", "objective", ""]), values, max_size=3))
@fuzz
def test_a_file_is_refused_by_name_or_is_valid_in_every_field(tmp_path, found):
    path = tmp_path/"my.yaml"
    path.write_text(yaml.safe_dump(found))
    try: s = study(layered("digits", str(path)))
    except UserError as e:
        assert str(e).startswith(f"{path}: ") and len(str(e).splitlines()) == 1, e
        assert any(repr(k) in str(e) or f"parameter {k} " in str(e) or k in str(e) for k in found) or "flat lines" in str(e), e
        assert "must be" in str(e) or "valid: " in str(e) or "not the number" in str(e) or "objective belongs to a run" in str(e), e
        return
    for k in found: assert valid(FIELDS[k], getattr(s, k)), (k, found[k], getattr(s, k))
    assert study(json.loads(json.dumps(study_values(s)))) == s


@pytest.mark.parametrize("bad", [None, {"a": 1}, [[1]], [None], True, float("nan"), float("inf"), -1e9, "\x00?", 2**70], ids=repr)
def test_no_field_takes_what_makes_no_sense(bad):
    base = layered("digits")
    for name, f in FIELDS.items():
        if bad is True and name == "stream" or bad == 2**70 and f.type is float or bad == "\x00?" and name in ("root", "out", "runs", "data", "labels"): continue   # YAML's yes, a large number, a folder, words that only the data set can judge
        with pytest.raises(UserError, match=f"{name}|unknown data set"): study(base | {name: bad})


@pytest.mark.parametrize("text, says", [("taus: [-1]", "parameter taus = [-1.0]: -1.0 must be a number > 0"), ("taus: [.nan, 1]", "nan must be"), ("taus: [0.5, 0.5]", "must be different values"),
                                        ("batch_sizes: [50, 50]", "must be different values"), ("batch_sizes: [1, 50]", "1 must be a whole number >= 2"), ("class_counts: [2, 2]", "must be different values")])
def test_a_value_of_a_sweep_is_refused_under_the_name_of_the_sweep(tmp_path, text, says):
    (tmp_path/"my.yaml").write_text(text)
    with pytest.raises(UserError) as e: study(layered("digits", str(tmp_path/"my.yaml")))
    assert str(e.value).startswith(f"{tmp_path}/my.yaml: parameter {text.partition(':')[0]} = [") and says in str(e.value)


@pytest.mark.parametrize("setting, experiment", [("taus=[0.5]", "03_temperature"), ("taus=[]", "03_temperature"), ("class_counts=[4]", "02_classes"), ("class_counts=[]", "08_loss_gap"), ("batch_sizes=[200]", "04_batch_size"), ("n_ref=10", "08_loss_gap")])
def test_a_sweep_without_a_trend_is_refused_before_anything_trains_where_it_is_asked_for(setting, experiment, capsys):
    assert main(["reproduce", "digits", "--dry-run", "--set", setting, "--experiment", experiment]) == 2
    said = capsys.readouterr().err
    assert f"parameter {setting.partition('=')[0]} = " in said and experiment in said and len(said.splitlines()) == 1
    assert main(["reproduce", "digits", "--dry-run", "--set", setting, "--experiment", "01_alignment"]) == 0


@pytest.mark.parametrize("data", ["..", ".", "owner/", "owner/.."])
def test_no_name_of_data_leads_out_of_the_results(data, capsys):
    assert main(["reproduce", "hub", "--dry-run", "--set", f"data={data}"]) == 2 and "must be a name" in capsys.readouterr().err


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    s = study(layered("digits", root="~/birds", out="~/results", runs="~/runs"))
    assert (s.root, s.out, s.runs) == tuple(f"{tmp_path}/{n}" for n in ("birds", "results", "runs"))


def test_an_option_that_stands_twice_adds_up(capsys):
    "Nothing is dropped in silence: both spellings plan the same runs."
    def plan(*argv):
        assert main(["reproduce", "digits", "--dry-run", *argv]) == 0
        return capsys.readouterr().out.splitlines()[:-1]
    once = plan("--preset", "smoke", "smoke", "--set", "tau=0.3", "lr=0.2", "--experiment", "01_alignment", "03_temperature")
    assert plan("--preset", "smoke", "--preset", "smoke", "--set", "tau=0.3", "--set", "lr=0.2", "--experiment", "01_alignment", "--experiment", "03_temperature") == once
    from cl_nscl.run import parser
    args = parser().parse_args(["train", "digits", "--objective", "cl", "--objective", "ce", "--set", "seed=1"])
    assert args.objective == ["cl", "ce"] and parser().parse_args(["train", "digits"]).set == []   # a default that is not added to
    assert parser().parse_args(["reproduce", "digits", "--sbatch", "account=a", "--sbatch", "mem=1G"]).sbatch == ["account=a", "mem=1G"]


TRAPS = ["seed: 010", "epochs: 1:30", "tau: 0:30.5", "n_train: 1_0:00", "tau: 2024-99-99", "tau: 2024-01-01", "tau:", "tau: ~", "B: yes", "flip: on", "K: !!bool x", "tau: !!timestamp x", "lr: .inf", "lr: .nan",
         "tau: 0.1\ntau: 0.2", "tau: 0.1\n  lr: 1", "- tau", "tau", "1: 2", "on: 1", "[a]: 1", "? {a: 1}\n: 2", "tau: {a: 1}", "classes: [[1]]", "classes: !!set {1, 2}", "classes: [1, two]", "classes: [1, yes]",
         "tau: &a [*a]", "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\ntau: [*c,*c,*c,*c,*c,*c,*c,*c]", "tau: !!python/object/apply:os.system [true]", "tau: " + "[" * 5000,
         "epochs: " + "9" * 5000, "epochs: 1e400", "tau: '0,5'", "tau: 0,5", "lr: 3e-4x", "<<: 1", "tau: =", "\ttau: 1", "tau: 1\x00", "tau: '", "%YAML 9\n---\ntau: 1", "tau: 1\n---\ntau: 2"]


@pytest.mark.parametrize("text", TRAPS, ids=lambda t: repr(t[:24]))
def test_traps_of_yaml_are_refused_with_the_file_and_nothing_trains(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path/"my.yaml").write_text(text)
    assert main(["reproduce", "digits", "--preset", "my.yaml"]) == 2
    said = capsys.readouterr().err
    assert "my.yaml: " in said and len(said.splitlines()) == 1 and len(said) < 1000 and [p.name for p in tmp_path.iterdir()] == ["my.yaml"], said


@pytest.mark.parametrize("setting", ["seed=010", "epochs=1:30", "tau=[", "tau", "=1", "tau=", "tau=2024-99-99", "classes=[1, [2]]", "tau=!!bool x"])
def test_settings_by_hand_fall_into_no_trap(setting, capsys):
    assert main(["reproduce", "digits", "--dry-run", "--set", setting]) == 2 and len(capsys.readouterr().err.splitlines()) == 1


@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass"))))
@fuzz
def test_any_bytes_are_a_flat_mapping_or_a_refusal(tmp_path, data):
    (tmp_path/"x.yaml").write_bytes(data)
    try: found = read_yaml(tmp_path/"x.yaml")
    except UserError as e: assert str(e).startswith(f"{tmp_path/'x.yaml'}: ")
    else: assert all(isinstance(k, str) and not isinstance(v, dict) for k, v in found.items())


@given(p=st.builds(Params, tau=st.floats(1e-6, 1e6), lr=st.floats(1e-9, 1e9), seed=st.integers(0, 2**62), classes=st.lists(st.integers(0, 9), max_size=5).map(tuple), epochs=st.integers(1, 10**6)))
@fuzz
def test_what_is_stored_beside_a_run_names_the_same_run(p):
    again = Params(**json.loads(json.dumps(dataclasses.asdict(p))))
    assert again == p and run_id(again) == run_id(p)
    assert Params(**yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(p)))))) == p


def test_numbers_that_look_like_numbers_stay_what_they_look_like():
    for text, want in (("tau=3e-4", 3e-4), ("tau=.5", 0.5), ("epochs=1_000", 1000), ("epochs=0", 0), ("lr=1.0e-3", 1e-3), ("seed=-0", 0)): assert float(parsed(text)[1]) == want
    assert parse_yaml("0.10") == 0.1
    assert study(layered("digits", **dict(map(parsed, ["stream=no"])))).stream == "no" and study(layered("digits", stream=True)).stream == "yes"   # YAML's words for True and False
