"""Every library notebook is one test case; the repository's notebooks are clean, exported and consistent."""
import ast, filecmp, json, re, shutil, subprocess, sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))
ALL = sorted((ROOT/"nbs").rglob("*.ipynb"))
ALL = [p for p in ALL if ".ipynb_checkpoints" not in p.parts]
cells = lambda p: json.loads(p.read_text(encoding="utf-8"))["cells"]
source = lambda c: "".join(c["source"])
RUN = """
import importlib, json, sys
from pathlib import Path
test, made = importlib.import_module("nbdev.test"), []
class Shell(test.CaptureShell):
    def run_all(self, nb, **kw):
        made.append(nb)
        return super().run_all(nb, **kw)
test.CaptureShell = Shell
ok, _ = test.test_nb(Path(sys.argv[1]), skip_flags=["notest", "slow", "gpu"])
Path(sys.argv[2]).write_text(json.dumps([c.get("outputs", []) for c in made[0].cells], default=str))
sys.exit(not ok)
"""  # `nbdev.test` also exports a function of that name, so the module is imported by its name


def tables(outputs): # per cell -> the tables among them
    texts = ["".join(o.get("data", {}).get(kind, "")) for cell in outputs for o in cell for kind in ("text/html", "text/markdown")]
    return [t for t in texts if "<table" in t or "|---" in t]


def numbers(text): return [float(x) for x in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", re.sub(r"<style.*?</style>", "", text, flags=re.S))]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_notebook_runs_and_its_tables_are_not_stale(path, tmp_path):
    "In a process of its own, as nbdev_test runs it: no state leaks from one notebook into the next. Last digits may differ between machines."
    done = subprocess.run([sys.executable, "-c", RUN, str(path), str(tmp_path/"outputs.json")], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    stored, again = tables([c.get("outputs", []) for c in cells(path)]), tables(json.loads((tmp_path/"outputs.json").read_text()))
    assert len(stored) == len(again), "run make notebooks"
    for old, new in zip(stored, again):
        a, b = numbers(old), numbers(new)
        assert len(a) == len(b) and all(abs(x - y) <= 0.02 * max(1, abs(x)) for x, y in zip(a, b)), f"run make notebooks: {[(x, y) for x, y in zip(a, b) if x != y][:9]}"


def test_N03_every_parameters_cell_holds_plain_values():
    from cl_nscl.run import check_notebook
    checked = [p for p in ALL if any("parameters" in c["metadata"].get("tags", []) for c in cells(p))]
    assert len(checked) >= 9
    for p in checked: check_notebook(p, {})


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_notebook_is_well_formed(path):
    "N02, N07, N12: a title and a one-line description, the project's kernel, no error outputs, no conflict markers."
    text = path.read_text(encoding="utf-8")
    for n, line in enumerate(text.splitlines(), 1):
        assert not re.match(r'\s*"?(<<<<<<<|>>>>>>>) ', line), f"{path.name}:{n}: conflict marker"
    nb = json.loads(text)
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    first = source(nb["cells"][0])
    assert re.match(r"# \S.*\n\n> \S", first), "the first cell is a title and a one-line description"
    assert not any(o["output_type"] == "error" for c in nb["cells"] for o in c.get("outputs", []))
    tagged = [c for c in nb["cells"] if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == (1 if path.parent.name == "experiments" else 0)


@pytest.mark.parametrize("path", ALL, ids=lambda p: p.stem)
def test_stored_outputs_hold_no_path_of_a_machine(path):
    for c in cells(path):
        for o in c.get("outputs", []):
            found = re.search(r"/(?:home|root|work|Users|tmp)/[\w.-]+", json.dumps(o))
            assert not found, f"{path.name}: {found[0]}"


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: p.stem)
def test_exported_cells_are_short(path):
    long = [len(source(c).splitlines()) for c in cells(path) if source(c).startswith("#| export")]
    assert max(long, default=0) <= 55


def test_export_and_clean_leave_no_diff(tmp_path):
    "Export and clean are a fixed point: what is committed is what the notebooks say."
    for name in ("nbs", "cl_nscl"): shutil.copytree(ROOT/name, tmp_path/name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT/"settings.ini", tmp_path)
    run = lambda module: subprocess.run([sys.executable, "-c", f"from nbdev.{module}"], cwd=tmp_path, capture_output=True, text=True)
    for code in ("clean import nbdev_clean as f; f()", "export import nb_export; from nbdev.doclinks import nbdev_export; nbdev_export()"):
        done = run(code)
        assert done.returncode == 0, done.stderr[-3000:]
    differ = []
    for old in sorted([*(ROOT/"nbs").rglob("*.ipynb"), *(ROOT/"cl_nscl").rglob("*.py")]):
        if ".ipynb_checkpoints" in old.parts: continue
        new = tmp_path/old.relative_to(ROOT)
        if not new.exists() or not filecmp.cmp(old, new, shallow=False): differ.append(str(old.relative_to(ROOT)))
    extra = [str(p.relative_to(tmp_path)) for p in (tmp_path/"cl_nscl").rglob("*.py") if not (ROOT/p.relative_to(tmp_path)).exists()]
    assert not differ + extra, f"run nbdev_export and nbdev_clean: {differ + extra}"


def _order(): # module name -> number of its notebook
    order = {}
    for p in LIBRARY:
        found = re.search(r"#\|\s*default_exp (\w+)", "\n".join(map(source, cells(p))))
        if found: order[found[1]] = int(p.stem.split("_")[0])
    return order


def test_imports_only_point_downwards():
    order = _order()
    assert order["core"] == 0
    for name, number in order.items():
        tree = ast.parse((ROOT/"cl_nscl"/f"{name}.py").read_text())
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom): continue
            assert not any(a.name == "*" for a in node.names), f"{name} imports a star"
            target = (node.module or "").split(".")
            if node.level or target[0] == "cl_nscl":
                if target[-1] in ("", "cl_nscl"): continue # the package itself: its version
                assert order[target[-1]] < number, f"{name} ({number}) imports {target[-1]} ({order[target[-1]]})"
        upwards = {w for w in re.findall(r"[\"']cl_nscl\.(\w+)[\"']", (ROOT/"cl_nscl"/f"{name}.py").read_text()) if order.get(w, 0) >= number} # imported by a name in quotes
        assert upwards <= ({"sources"} if name == "data" else {name}), f"{name} ({number}) reaches up to {upwards}"


def test_layers_do_not_mix():
    "Metrics, bounds and plots know no models, twins or files; papermill is imported by the runner alone."
    for name in _order():
        text = (ROOT/"cl_nscl"/f"{name}.py").read_text()
        if name in ("similarity", "probes", "collapse", "weights", "intervals", "bounds", "dynamics", "plots"):
            for other in ("models", "twins", "store", "measure", "plan", "run"):
                assert not re.search(rf"from (cl_nscl)?\.{other} import", text), f"{name} imports {other}"
        if name != "run": assert "import papermill" not in text


def test_modules_import():
    for name in _order(): import_module(f"cl_nscl.{name}")


def test_the_ledger_lists_every_random_stream():
    ledger = next(source(c) for c in cells(ROOT/"nbs/00_core.ipynb") if source(c).startswith("## The randomness ledger"))
    for name in _order():
        for word in re.findall(r'(?:generator|key_seed|seeded)\([\w.]+, "(\w+)"', (ROOT/"cl_nscl"/f"{name}.py").read_text()):
            assert f'"{word}"' in ledger, f"{name} draws from {word!r}"
