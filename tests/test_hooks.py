"""The git hook: a commit with a notebook that was run, or an export that is stale, is refused and mended."""
import json, os, shutil, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_hook_cleans_a_notebook_and_lets_a_clean_one_pass(tmp_path):
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    run = lambda *argv: subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True)
    for name in ("settings.ini", "LICENSE"): shutil.copy(ROOT/name, tmp_path)
    for name in (".githooks", "cl_nscl"): shutil.copytree(ROOT/name, tmp_path/name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path/"nbs").mkdir()
    for p in (ROOT/"nbs").glob("*.ipynb"): shutil.copy(p, tmp_path/"nbs")
    for argv in (["init", "-q"], ["config", "user.name", "a"], ["config", "user.email", "a@b.c"], ["add", "-A"], ["commit", "-qm", "start"], ["config", "core.hooksPath", ".githooks"]):
        done = run("git", *argv)
        assert done.returncode == 0, done.stderr
    path = tmp_path/"nbs/00_core.ipynb"
    nb = json.loads(path.read_text())
    next(c for c in nb["cells"] if c["cell_type"] == "code")["execution_count"] = 7
    path.write_text(json.dumps(nb))
    run("git", "add", "-A")
    done = run("git", "commit", "-qm", "dirty")
    assert done.returncode == 1 and "cleaned and exported" in done.stderr, done.stderr
    assert path.read_text() == (ROOT/"nbs/00_core.ipynb").read_text()
    lines, modules = path.read_text().splitlines(), {p.name: p.read_bytes() for p in (tmp_path/"cl_nscl").glob("*.py")}
    path.write_text("\n".join([*lines[:3], "<<<<<<< HEAD", lines[3], "=======", lines[3], ">>>>>>> other", *lines[4:]]) + "\n")
    run("git", "add", "-A")
    done = run("git", "commit", "-qm", "conflict")                                           # N12: file and line, no traceback, no half a module
    assert done.returncode == 1 and "nbs/00_core.ipynb:4:<<<<<<< HEAD" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert modules == {p.name: p.read_bytes() for p in (tmp_path/"cl_nscl").glob("*.py")}
    shutil.copytree(ROOT/"tools", tmp_path/"tools")
    for which in ("readme", "00"):
        done = run(sys.executable, "tools/notebooks.py", which)
        assert done.returncode == 1 and done.stderr.startswith("nbs/00_core.ipynb:4: a conflict marker"), done.stderr
    path.write_text((ROOT/"nbs/00_core.ipynb").read_text())
    shutil.rmtree(tmp_path/"tools")
    (tmp_path/"nbs/note.ipynb").write_text((ROOT/"nbs/index.ipynb").read_text())
    run("git", "add", "-A")
    done = run("git", "commit", "-qm", "clean")
    assert done.returncode == 0, done.stderr
