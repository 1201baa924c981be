"Charts: marks and numbers in the saved JSON, bad points in sight, long frames, files that do not change."
import json, math, sys, warnings

import altair as alt, numpy as np, pandas as pd, pytest

from cl_nscl import plots
from cl_nscl.plots import COLOURS, alignment_chart, bar_chart, heat_chart, over_seeds, save_chart, styles, thin, trend_chart, weights_chart

PAIRS = ("cl-nscl", "cl-scl", "cl-ce")

def tidy(epochs=range(0, 50, 10), seeds=(0, 1, 2), metrics=("cka", "rsa", "weight_gap"), splits=("train", "test")):
    rows = [(f"r{s}", e, sp, p, m, s, 1 - (0.1 + 0.01 * s) * (1 + i) * e / (e + 20)) for s in seeds for i, p in enumerate(PAIRS) for e in epochs for m in metrics for sp in splits]
    return pd.DataFrame(rows, columns=["run", "epoch", "split", "pair", "metric", "seed", "value"])

def walk(spec, key):
    "All values of `key` anywhere in a spec."
    if isinstance(spec, dict):
        if key in spec: yield spec[key]
        for v in spec.values(): yield from walk(v, key)
    elif isinstance(spec, list):
        for v in spec: yield from walk(v, key)

def marks(spec): return {m if isinstance(m, str) else m["type"] for m in walk(spec, "mark")}
def rows(spec): return [r for data in spec["datasets"].values() for r in data]
def texts(spec): return {r["bad"] for r in rows(spec) if r.get("bad")}

CHARTS = {
    "alignment": lambda: alignment_chart(tidy()),
    "weights": lambda: weights_chart(tidy()),
    "trend": lambda: trend_chart(tidy(epochs=(2, 4, 8), metrics=("cka",)).rename(columns={"epoch": "C"}), "C", "Classes", log_x=True),
    "bar": lambda: bar_chart(pd.DataFrame({"objective": ["cl", "ce"] * 2, "metric": "nccc", "seed": [0, 0, 1, 1], "value": [87, 91, 88, 92.0], "paper": [88.37, 92.97] * 2}), "Accuracy", unit="%"),
    "heat": lambda: heat_chart(pd.DataFrame({"i": [0, 0, 1], "j": [0, 1, 1], "value": [0.1, 0.2, 0.3]}), "Pairs"),
}
MARKS = dict(alignment={"area", "line", "point"}, weights={"area", "line", "point"}, trend={"rule", "line", "point"}, bar={"bar", "rule", "tick", "text", "point"}, heat={"rect", "text"})


@pytest.mark.parametrize("name", CHARTS)
def test_saved_json_holds_the_marks_and_the_numbers(name, tmp_path):
    files = save_chart(CHARTS[name](), tmp_path / "new folder" / name)
    assert [f.suffix for f in files] == [".json", ".svg", ".png"] and all(f.stat().st_size > 500 for f in files)
    spec = json.loads(files[0].read_text())
    assert marks(spec) == MARKS[name]
    assert rows(spec) and all(r["value"] is not None for r in rows(spec)) and not texts(spec)
    assert len(spec["description"]) > 20 and spec["title"]["text"]
    assert "NaN" not in files[1].read_text() and files[2].read_bytes()[:4] == b"\x89PNG"

@pytest.mark.parametrize("name", CHARTS)
def test_files_are_the_same_bytes_each_time(name, tmp_path):
    a = save_chart(CHARTS[name](), tmp_path / "a"); CHARTS["alignment"](); b = save_chart(CHARTS[name](), tmp_path / "b")
    for f, g in zip(a, b): assert f.read_bytes() == g.read_bytes()


def test_axes_carry_titles_and_a_pair_keeps_its_colour_whatever_is_beside_it():
    for df in (tidy(), tidy()[lambda d: d.pair == "cl-ce"]):
        spec = alignment_chart(df).to_dict()
        for colour in walk(spec, "color"):
            if isinstance(colour, dict) and "scale" in colour:
                assert dict(zip(colour["scale"]["domain"], colour["scale"]["range"]))["CL to CE"] == COLOURS["ce"]
        assert {"epoch", "CKA", "RSA"} <= {t for t in walk(spec, "title") if isinstance(t, str)}

def test_colours_of_the_objectives_differ_in_grey_too():
    def grey(c): return sum(w * (int(c[i:i + 2], 16) / 255) ** 2.2 for w, i in ((0.2126, 1), (0.7152, 3), (0.0722, 5)))
    assert all(1.05 / (grey(c) + 0.05) >= 3 for c in COLOURS.values())           # contrast on white
    assert len({str(v) for v in plots.DASHES.values()}) == len(set(plots.SHAPES.values())) == len(set(COLOURS.values())) == len(COLOURS)
    st = styles(["cl", "nscl", "scl", "ce", "ntxent", "mine", "yours"])
    assert len({c for c, _, _ in st.values()}) == 7 and st["mine"] != st["yours"]


def test_values_of_the_frame_are_the_values_of_the_chart():
    df = tidy(seeds=(0,), metrics=("cka",), splits=("test",)).drop(columns="seed")
    drawn = {(r["epoch"], r["pair"]): r["value"] for r in rows(alignment_chart(df).to_dict())}
    assert drawn == {(r.epoch, r.pair): r.value for r in df.itertuples()}

def test_intervals_are_students_over_seeds_and_given_ones_are_kept():
    m = over_seeds(pd.DataFrame({"tau": 0.5, "seed": range(4), "value": [1.0, 2.0, 3.0, 6.0]}), ["tau"]).iloc[0]
    assert m.value == 3 and m.n == 4 and m.high - m.value == pytest.approx(3.18245 * np.std([1, 2, 3, 6], ddof=1) / 2, rel=1e-5)
    given = over_seeds(pd.DataFrame({"tau": [0.5], "value": [1.0], "low": [0.9], "high": [1.3]}), ["tau"]).iloc[0]
    assert (given.low, given.high) == (0.9, 1.3)
    one = alignment_chart(tidy(seeds=(0,))).to_dict()
    assert "area" not in marks(one) and not one["title"].get("subtitle")

@pytest.mark.parametrize("metric, values, ends", [("nccc", [99.5, 97.0, 99.0], (None, 100)), ("cka", [0.02, 0.1, 0.5], (0, None)), ("cka", [0.9, 0.99, 0.7], (None, 1)), ("rsa", [0.02, 0.1, 0.5], (None, None)), ("nc4", [1, 1, 1], (1, 1)), ("mine", [150.0, 99.0, 98.0], (None, None))])
def test_intervals_end_where_the_measure_does(metric, values, ends):
    df = pd.DataFrame({"metric": metric, "seed": range(3), "value": values})
    free = over_seeds(df.assign(metric="mine"), ["metric"]).iloc[0]
    for found in (over_seeds(df, ["metric"]).iloc[0], over_seeds(df.assign(pair="cl-ce"), ["pair"]).iloc[0]):       # the metric may be a key, or the only one
        assert (found.low, found.high) == (free.low if ends[0] is None else ends[0], free.high if ends[1] is None else ends[1])
        assert found.low <= found.value <= found.high


def test_single_seeds_are_drawn_where_they_are_few():
    df = tidy(epochs=(2, 4, 8), metrics=("cka",), splits=("test",))
    spec = trend_chart(df, "epoch", "Sweep").to_dict()
    drawn = sorted(r["value"] for r in rows(spec) if "low" not in r)
    assert drawn == sorted(df.value) and "circles: single seeds" in spec["title"]["subtitle"]
    many = pd.concat([df.assign(seed=df.seed + 3 * k) for k in range(4)])
    for chart in (trend_chart(many, "epoch", "Sweep"), trend_chart(df, "epoch", "Sweep", band=True), trend_chart(df[df.seed == 0], "epoch", "Sweep")):
        assert all("low" in r for r in rows(chart.to_dict()))


def test_lines_that_lie_upon_each_other_are_set_apart_but_keep_their_numbers():
    df = tidy(epochs=(50, 200), metrics=("cka",), splits=("test",)).rename(columns={"epoch": "B"})
    spec = trend_chart(df, "B", "Batches", log_x=True, apart=True).to_dict()
    found = pd.DataFrame([r for r in rows(spec) if "low" in r])
    assert found.groupby("B")["at"].nunique().eq(3).all() and set(found.B) == {50, 200} and (found["at"] / found.B - 1).abs().max() < 0.06
    assert set(map(str, walk(spec, "values"))) == {"[50, 200]"}


def test_bars_of_one_unit_share_an_axis_that_ends_at_what_can_be():
    df = pd.DataFrame({"objective": ["cl", "ce"] * 4, "metric": ["nccc"] * 4 + ["linear"] * 4, "seed": [0, 0, 1, 1] * 2, "value": [12, 50, 14, 52, 99.5, 98, 97, 99.9]})
    spec = bar_chart(df, "Accuracy", unit="%", level=(5, "chance, 5 %")).to_dict()
    assert {str(d) for d in walk(spec, "domain") if not isinstance(d[0], str)} == {"[0, 100]"}
    assert spec["title"]["subtitle"][-1] == "dashed: chance, 5 %" and 5 in [r["value"] for r in rows(spec)]


def test_rows_that_no_seed_tells_apart_are_refused():
    df = pd.concat([tidy().assign(tau=t) for t in (0.1, 0.5)])
    with pytest.raises(ValueError, match="several rows for the point .*filter the frame"): alignment_chart(df)
    with pytest.raises(ValueError, match="no column epoch; its columns: C"): alignment_chart(tidy().rename(columns={"epoch": "C"})[["C", "pair", "metric", "value"]])
    with pytest.raises(ValueError, match="no rows"): alignment_chart(tidy().head(0))
    with pytest.raises(ValueError, match="metric weight_gap"): weights_chart(tidy(metrics=("cka",)))


def test_N15_diverged_points_are_marked_and_listed(tmp_path):
    df = pd.DataFrame({"epoch": [0, 1, 2, 3], "pair": "cl-ce", "metric": "cka", "value": [1.0, math.nan, math.inf, -math.inf]})
    svg = save_chart(alignment_chart(df), tmp_path / "c")[1].read_text()
    spec = alignment_chart(df).to_dict()
    assert texts(spec) == {"NaN", "+inf", "-inf"}
    assert spec["title"]["subtitle"] == [f"not drawable: epoch {e}, CL to CE, CKA: {w}" for e, w in ((1, "NaN"), (2, "+inf"), (3, "-inf"))]
    for word in (">NaN<", ">+inf<", ">-inf<"): assert word in svg               # in the panel itself

def test_N15_nothing_but_bad_points_still_says_so():
    spec = alignment_chart(pd.DataFrame({"epoch": range(9), "pair": "cl-ce", "metric": "cka", "value": math.nan})).to_dict()
    assert len(spec["title"]["subtitle"]) == 4 and spec["title"]["subtitle"][-1] == "and 6 more that are not drawable"

def test_N15_one_bad_seed_is_out_of_the_mean_and_said():
    df = tidy(metrics=("cka",), splits=("test",))
    df.loc[(df.seed == 1) & (df.epoch == 40) & (df.pair == "cl-ce"), "value"] = math.inf
    spec = alignment_chart(df).to_dict()
    assert texts(spec) == {"+inf"} and spec["title"]["subtitle"][-1] == "not drawable: epoch 40, CL to CE, CKA, test: +inf"

def test_N15_a_log_axis_hides_no_zero():
    df = pd.DataFrame({"C": [2, 4, 8], "pair": "cl-ce", "metric": "drift", "value": [10.0, 0.0, -1.0]})
    assert texts(trend_chart(df, "C", "Drift", log_y=True).to_dict()) == {"<= 0"}
    assert not texts(trend_chart(df, "C", "Drift").to_dict())
    for C, kw, words in (([0, 4, 8], dict(log_x=True), "above 0"), ([1, math.nan, 2], {}, "finite"), ([1, math.inf, 2], {}, "finite")):
        with pytest.raises(ValueError, match=f"column C.*{words}"): trend_chart(df.assign(C=C), "C", "Drift", **kw)

@pytest.mark.parametrize("value,word", [(math.nan, "NaN"), (math.inf, "+inf")])
def test_N15_bars_and_squares_too(value, word, tmp_path):
    bars = pd.DataFrame({"objective": ["cl", "ce"], "metric": "nccc", "value": [88.0, value]})
    squares = pd.DataFrame({"i": [0, 0], "j": [0, 1], "value": [0.5, value]})
    for chart in (bar_chart(bars, "Bars"), heat_chart(squares, "Squares")):
        assert word in chart.to_dict()["title"]["subtitle"][-1]
        assert f">{word}<" in save_chart(chart, tmp_path / "c")[1].read_text()


def test_N13_long_frames_make_small_charts_and_the_row_limit_stays(tmp_path):
    limit = dict(alt.data_transformers.options)
    pairs = pd.DataFrame([(i, j, i * j) for i in range(110) for j in range(i, 110)], columns=["i", "j", "value"])
    spec = heat_chart(pairs, "Class pairs").to_dict()
    assert len(rows(spec)) < 2000 and spec["title"]["subtitle"] == ["each cell is the mean of its block"]
    assert sum(r["value"] for r in rows(spec) if r["col"] == "0-2" and r["row"] == "0-2") == pytest.approx((0 + 0 + 0 + 1 + 2 + 4) / 6)
    line = pd.DataFrame({"epoch": range(6000), "pair": "cl-ce", "metric": "cka", "value": 0.5})
    spec = json.loads(save_chart(alignment_chart(line), tmp_path / "c")[0].read_text())
    assert len(rows(spec)) == 3001 and spec["title"]["subtitle"] == ["drawn: 1 epoch in 2, and the last"]
    line.loc[line.epoch == 4001, "value"] = math.inf
    assert texts(alignment_chart(line).to_dict()) == {"+inf"}                    # thinning hides no fault
    assert dict(alt.data_transformers.options) == limit

def test_N13_thinning_keeps_ends_and_first_bad_points():
    df = over_seeds(pd.DataFrame({"epoch": range(101), "pair": "cl-ce", "value": [math.nan if e in (33, 34) else 1.0 for e in range(101)]}), ["epoch", "pair"])
    kept, k = thin(df, "epoch", "pair", rows=10)
    assert k == 11 and list(kept.epoch) == [0, 11, 22, 33, 44, 55, 66, 77, 88, 99, 100]


def test_N16_without_vl_convert_json_and_html_are_written_with_one_message(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        files = save_chart(CHARTS["alignment"](), tmp_path / "c")
        again = save_chart(CHARTS["alignment"](), tmp_path / "d")
    assert [f.name for f in files] == ["c.json", "c.html"] and "vega" in files[1].read_text()
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]
    assert len(said) == 2 and "pip install vl-convert-python" in str(said[0].message)

def test_plots_import_nothing_that_trains():
    import ast, inspect
    names = [getattr(n, "module", None) or n.names[0].name for n in ast.walk(ast.parse(inspect.getsource(plots))) if isinstance(n, (ast.Import, ast.ImportFrom))]
    assert not any(n.startswith(("cl_nscl", "torch")) for n in names)


def test_a_legend_shows_the_line_with_its_dash_and_a_point_large_enough_to_see():
    "A wedge was an invisible speck; a key without its dash is unreadable in grey."
    spec = trend_chart(tidy(epochs=(2, 4, 8), metrics=("cka",)).assign(pair=lambda f: f.pair.map(dict(zip(PAIRS, "abc")))).rename(columns={"epoch": "C"}), "C", "Classes").to_dict()
    legends = [l for l in walk(spec, "legend") if l]
    assert legends and all(l["symbolStrokeWidth"] > 1 and l["symbolSize"] >= 70 and l["orient"] == "bottom" and l["columns"] <= 4 for l in legends)
    assert "wedge" not in str(plots.SPARES) and {s for _, _, s in plots.SPARES} | set(plots.SHAPES.values()) <= set(plots._KEYS)
    looks = [s for s in [*((COLOURS[o], plots.DASHES[o], plots.SHAPES[o]) for o in COLOURS), *plots.SPARES]]
    assert len({c for c, _, _ in looks}) == len({str(s) for s in looks}) == len(looks)


def test_charts_that_name_all_of_one_list_agree_on_each_style():
    every = ["measured", "ours", "paper"]
    df = tidy(epochs=(2, 4, 8), metrics=("cka",), splits=("test",)).rename(columns={"epoch": "C"})
    colour = lambda names: dict(zip(*(next(c["scale"] for c in walk(trend_chart(df[df.pair.isin(names)].assign(pair=lambda f: f.pair.map(names)), "C", "x", among=every).to_dict(), "color")
                                           if isinstance(c, dict) and "scale" in c)[k] for k in ("domain", "range"))))
    one, two = colour({"cl-nscl": "measured", "cl-ce": "paper"}), colour({"cl-ce": "paper", "cl-scl": "ours"})
    assert set(one) == {"measured", "paper"} and one["paper"] == two["paper"] != two["ours"]
