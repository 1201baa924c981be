"""The README is made from the index notebook; its table of names and its Python code are true."""
import re, subprocess, sys
from importlib import import_module
from pathlib import Path

import pytest

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
