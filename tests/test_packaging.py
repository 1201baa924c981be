"""settings.ini is the source of the package's metadata; pyproject.toml stands beside it and says the same."""
import configparser, tomllib
from pathlib import Path

from fastcore.test import test_eq as eq

ROOT = Path(__file__).resolve().parent.parent
ini = configparser.ConfigParser()
ini.read(ROOT/"settings.ini")
S, P = ini["DEFAULT"], tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]
words = lambda name: sorted(S[name].split())


def test_settings_and_pyproject_agree():
    eq(S["lib_name"], P["name"]); eq(S["version"], P["version"]); eq(S["description"], P["description"])
    eq(f">={S['min_python']}", P["requires-python"]); eq(S["keywords"].split(), P["keywords"])
    eq(S["author"], P["authors"][0]["name"]); eq(S["author_email"], P["authors"][0]["email"])
    eq(words("requirements"), sorted(P["dependencies"]))
    eq(words("dev_requirements"), sorted(P["optional-dependencies"]["dev"]))
    for extra in ("cluster", "hub", "peers"): eq(words(f"{extra}_requirements"), sorted(P["optional-dependencies"][extra]))
    name, target = S["console_scripts"].split("=")
    eq(P["scripts"], {name: target})


def test_version_in_package():
    import cl_nscl
    eq(cl_nscl.__version__, P["version"])


def test_N09_cleaning_keeps_the_parameters_tag():
    "Without allowed_cell_metadata_keys = tags, cleaning drops the tag and papermill's values are silently overwritten."
    from nbdev.clean import clean_nb
    eq(S["allowed_cell_metadata_keys"].split(), ["tags"])
    nb = {"cells": [{"cell_type": "code", "source": "a = 1", "outputs": [], "execution_count": 1, "id": "a", "metadata": {"tags": ["parameters"], "x": 1}}], "metadata": {}}
    clean_nb(nb, allowed_cell_metadata_keys=S["allowed_cell_metadata_keys"].split())
    eq(nb["cells"][0]["metadata"], {"tags": ["parameters"]})
