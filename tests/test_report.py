"""Claims: checks apart from findings, margins, what chance decides; tables for people."""
import json, math, re

import numpy as np, pandas as pd, pytest

from cl_nscl.core import generator, run_id
from cl_nscl.plan import POINTS, alignment_points, downstream_points, layered, study, tasks, plan
from cl_nscl.report import Results, claim, claims_markdown, claims_table, final_table, load_results, multiplicity, number, save_results, sentence, summary_html, sweep_table, trend


def test_no_number_is_minus_zero():
    for v in np.linspace(-0.002, 0.002, 41): assert not re.search(r"-0\.0+(?!\d)", number(v, v - 1e-4, v + 1e-4))
    for digits in range(5): assert not number(-10.0 ** -(digits + 1), digits=digits).startswith("-")
    assert number(-0.0006) == "-0.001" and number(math.nan) == "nan"


@pytest.mark.parametrize("values, margin, word", [
    ([-.02, -.01, -.03], .05, "confirmed"), ([-.2, -.21, -.19], .05, "not confirmed"), ([-.09, .01, -.04], .05, "undecided"), ([-.02], .05, "seen (one seed)"), ([-.06], .05, "not seen (one seed)"), ([.1, .2, math.nan], .05, "undecided")])
def test_a_margin_moves_the_verdict_and_not_the_effect(values, margin, word):
    c, plain = claim("CKA falls by less than 0.05", pd.Series(values), unit="change of CKA", margin=margin), claim("x", pd.Series(values))
    assert c["verdict"] == word and c["margin"] == margin
    assert np.array_equal([c[k] for k in ("effect", "low", "high")], [plain[k] for k in ("effect", "low", "high")], equal_nan=True)
    assert "change of CKA" in sentence(c)


@pytest.mark.parametrize("values, word", [([1., 2.], "holds"), ([0.], "holds"), ([1., -1e-9, 1.], "fails"), ([1., math.nan], "undecided")])
def test_a_check_holds_in_every_seed_or_fails(values, word): assert claim("bound", pd.Series(values), kind="check")["verdict"] == word


CLAIMS = [claim("the bound holds", pd.Series([1., 2.]), unit="powers of ten", kind="check"), claim("CKA: NSCL > CE", pd.Series([.1, .11, .12]), "Figure 2"), claim("stays", pd.Series([.1, .11]), margin=.05)]


def test_findings_stand_above_checks_everywhere(tmp_path):
    table = claims_table(CLAIMS)
    assert table.kind.tolist() == ["finding", "finding", "check"] and list(claims_table(CLAIMS, "check").columns) == ["claim", "figure", "verdict", "effect", "unit", "seeds"]
    save_results(Results("01_alignment", tmp_path, "A title", {}, claims=CLAIMS))
    page = summary_html("digits", load_results(tmp_path), tmp_path).split("<h2 id=")[0]
    for text in (claims_markdown(CLAIMS), page.replace("&gt;", ">")):
        assert text.index("CKA: NSCL > CE") < text.index("chance alone") < text.index("Checks of theory and code") < text.index("the bound holds")
    assert json.loads((tmp_path/"01_alignment.json").read_text())["claims"][0]["kind"] == "check"


def test_results_from_before_there_were_kinds_are_findings():
    old = [{k: v for k, v in c.items() if k not in ("kind", "margin")} for c in CLAIMS]
    assert claims_table(old, "finding").claim.tolist() == [c["claim"] for c in CLAIMS] and "Of 3 findings" in multiplicity(old)
    assert "kind" in claims_table([]).columns and not len(claims_table([]))


def test_chance_decides_as_many_as_it_is_said_to():
    g, rounds = generator(0, "test"), 40
    import torch
    found = [claim("x", pd.Series(torch.randn(4, generator=g).tolist())) for _ in range(50 * rounds)]
    decided = sum(c["verdict"] != "undecided" for c in found)
    assert multiplicity(found).endswith(f"about {0.05 * len(found):.1f}.") and abs(decided - 0.05 * len(found)) < 4 * math.sqrt(0.05 * 0.95 * len(found))


def test_tables_have_words_for_people():
    rows = pd.DataFrame([dict(epoch=1., split=sp, pair=p, metric=m, value=0.5, seed=0, objective=p, tau=0.1) for p in ("cl-nscl", "cl-cl*") for sp, m in (("test", "cka"), ("test", "nc2_norms"), ("weights", "weight_gap"))])
    assert [*final_table(rows).columns] == ["test CKA", "test NC2, lengths of the means", "relative weight gap"] and final_table(rows).index[1] == "CL to CL, other batches and views"
    assert [*sweep_table(rows, ["tau", "pair"], ["metric"]).columns] == ["temperature τ", "twins", "CKA", "NC2, lengths of the means", "relative weight gap"]


def test_the_control_is_one_run_for_each_seed_of_01_alone():
    s = study(layered("digits", runs="nowhere"))
    extra = {run_id(p) for _, t in alignment_points(s) for p in t} - {run_id(p) for _, t in downstream_points(s) for p in t}
    assert len(extra) == s.seeds and not any(run_id(p) in extra for name in POINTS if name != "01_alignment" for _, t in POINTS[name](s) for p in t)
    control = [p for _, t in alignment_points(s) for p in t if run_id(p) in extra]
    assert len({p.drawn for p in control} | {p.seed for p in control}) == 2 * s.seeds                                     # no batches of another seed
    assert [g for g in tasks(plan(s, ["01_alignment"]), 1) if g[0].id in extra and len(g) > 1] == []                     # a group of its own
    off = study(layered("digits", runs="nowhere", control=0))
    assert {r.id for r in plan(s, ["01_alignment"])} - {r.id for r in plan(off, ["01_alignment"])} == extra and study(layered("cifar10", "paper")).control == 0
