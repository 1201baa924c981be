"""The README is made from the index notebook; its table of names and its Python code are true."""
import re, shutil, subprocess, sys
from importlib import import_module
from pathlib import Path

import nbformat, pandas as pd, pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT/"README.md").read_text()


def test_readme_is_the_index_notebook():
    sys.path.insert(0, str(ROOT/"tools"))
    from notebooks import readme
    assert README == readme(), "run make notebooks"


NAMES = [(m, n) for m, names in re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", README, re.M) for n in re.findall(r"`(\w+)`", names)]


def test_there_are_names(): assert len(NAMES) > 80


@pytest.mark.parametrize("module, name", NAMES)
def test_public_name_exists_and_is_documented(module, name):
    thing = getattr(import_module(f"cl_nscl.{module}"), name)
    assert not callable(thing) or (thing.__doc__ or "").strip()


def test_links_of_the_readme_exist():
    for link in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", README):
        link = link[0] or link[1]
        if not link.startswith("http"): assert (ROOT/link).exists(), link


def test_python_of_the_readme_runs_as_written(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README, re.S))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- what the index computes

INDEX = nbformat.read(ROOT/"nbs/index.ipynb", 4)


def computed(folder, cells=None): # what the code cells of the index show, where the results are those of `folder`
    import contextlib, io, os
    shown, space = [], {}
    with contextlib.chdir(folder/"nbs"), contextlib.redirect_stdout(io.StringIO()) as printed:
        for c in [c for c in INDEX.cells if c.cell_type == "code"][:cells]:
            *body, last = c.source.split("\nMarkdown(")
            exec(compile("\n".join(body) or last, "index", "exec"), space)
            if body: shown.append(eval(f"Markdown({last}", space).data)
    return shown + [printed.getvalue()]


@pytest.fixture
def studies(tmp_path): # a copy of what the table is made from
    for d in ("digits", "textures"):
        (tmp_path/"results"/d).mkdir(parents=True); shutil.copy(ROOT/"results"/d/"claims.csv", tmp_path/"results"/d)
    (tmp_path/"nbs").mkdir()
    return tmp_path


def change(folder, fn):
    file = folder/"results/digits/claims.csv"
    fn(pd.read_csv(file, keep_default_na=False)).to_csv(file, index=False)


def test_tables_of_the_readme_are_those_of_the_stored_results_and_measurements():
    *markdown, printed = computed(ROOT)
    stored = [o for c in INDEX.cells if c.cell_type == "code" for o in c.outputs]
    assert [o.data["text/markdown"] for o in stored if o.output_type != "stream"] == markdown, "run python tools/notebooks.py index"
    assert "".join(o.text for o in stored if o.output_type == "stream") == printed


def test_every_finding_has_a_row_or_is_counted_in_one(studies):
    contradicted = lambda: int(re.search(r"(\d+) contradicted; textures", computed(studies, 3)[0])[1])
    before = contradicted()
    change(studies, lambda t: pd.concat([t, t.iloc[:1].assign(experiment="04_batch_size", claim="O(B) slope minus the others", verdict="not confirmed", effect=-0.5, low=-0.6, high=-0.4)]))
    assert "| O(B) slope minus the others | Figure 2 | **contradicted**, -0.500 [-0.600, -0.400] | not run |" in computed(studies, 3)[0]
    assert contradicted() == before + 1


def test_a_claim_that_is_missing_is_an_error(studies):
    change(studies, lambda t: t[~t.claim.str.contains("CDNV")])
    with pytest.raises(ValueError, match="has no claim of 06_collapse"): computed(studies, 3)


def test_checks_are_no_findings_and_fresh_seeds_have_a_row_of_their_own(studies):
    before = computed(studies, 3)[0]
    change(studies, lambda t: pd.concat([t.assign(kind="finding"), t.iloc[:2].assign(claim="a check", kind="check")]))
    shutil.copytree(studies/"results/digits", studies/"results/confirm/digits")
    file = studies/"results/confirm/digits/claims.csv"
    t = pd.read_csv(file, keep_default_na=False); t[t.experiment == "03_temperature"].assign(seeds=20, effect=0.013, low=0.001, high=0.025, verdict="confirmed").to_csv(file, index=False)
    after = computed(studies, 3)[0]
    assert "Checks of digits beside the findings: 2 of 2 hold" in after and "| a check" not in after
    new = [l for l in after.splitlines() if l not in before.splitlines() and "Claims of" not in l]
    assert len(new) == 1 and "20 seeds" in new[0] and new[0].count("confirmed, 0.013 [0.001, 0.025] per ln tau") == 2


def test_citation_file_is_yaml_and_says_what_the_readme_says():
    import yaml
    cff = yaml.safe_load((ROOT/"CITATION.cff").read_text())
    assert cff["cff-version"] == "1.2.0" and cff["license"] == "Apache-2.0"
    assert cff["version"] == re.search(r"^version = (.*)$", (ROOT/"settings.ini").read_text(), re.M)[1]
    assert f"version = {{{cff['version']}}}" in README
    for paper in cff["references"]:
        assert paper["title"] in README and paper["url"].rsplit("/", 1)[1] in README
        for a in paper["authors"]: assert f"{a['family-names']}, {a['given-names']}" in README
