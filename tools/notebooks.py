"""Re-execute the notebooks in place, with their outputs; write README.md from nbs/index.ipynb. Experiments are not among them.

    python tools/notebooks.py            every notebook that teaches or exports, then the README
    python tools/notebooks.py 11 howto   only those whose paths in nbs/ start so
    python tools/notebooks.py readme     the README alone
"""
import os, re, sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbdev.clean import nbdev_clean

ROOT = Path(__file__).resolve().parent.parent


def resolved():
    "Stop, with file and line, at a notebook that a merge has left conflict markers in."
    for path in sorted((ROOT/"nbs").rglob("*.ipynb")):
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith(("<<<<<<< ", ">>>>>>> ")): sys.exit(f"{path.relative_to(ROOT)}:{n}: a conflict marker; resolve the conflict first (nbdev_fix helps)")


def execute(path: Path):
    "Run every cell in a fresh kernel, keep the outputs, clean."
    print(path.name, flush=True)
    nb = nbformat.read(path, 4)
    NotebookClient(nb, timeout=900, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}).execute()
    nbformat.write(nb, path)
    nbdev_clean(str(path))


def shown(cell) -> list[str]:
    "What a reader of the README sees of a cell: text as it is, code with what it prints, of a cell with echo: false the output alone."
    if cell.cell_type == "markdown": return [cell.source]
    out = [o.data["text/markdown"] if o.output_type != "stream" else f"```text\n{o.text.rstrip()}\n```" for o in cell.outputs]
    return out if cell.source.startswith("#| echo: false") else [f"```python\n{cell.source}\n```", *out]


def readme() -> str:
    "The index notebook as markdown, with its links as seen from the top folder."
    text = "\n\n".join(part for c in nbformat.read(ROOT/"nbs/index.ipynb", 4).cells for part in shown(c))
    link = lambda m: m[0] if re.match(r"(https?:|#)", m[2]) else f"{m[1]}{os.path.normpath('nbs/' + m[2])}{m[3]}"
    return re.sub(r"(\]\()([^)\s]+)(\))", link, re.sub(r'((?:src|href)=")([^"]+)(")', link, text)) + "\n"


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]) # how-to pages call cl-nscl
    os.chdir(ROOT)
    resolved()
    wanted = [a for a in sys.argv[1:] if a != "readme"]
    if wanted or len(sys.argv) == 1:
        found = [p for glob in ("[0-9]*.ipynb", "architecture.ipynb", "index.ipynb", "learn/*.ipynb", "howto/*.ipynb") for p in sorted((ROOT/"nbs").glob(glob))]
        for p in found:
            if not wanted or p.relative_to(ROOT/"nbs").as_posix().startswith(tuple(wanted)): execute(p)
    (ROOT/"README.md").write_text(readme())
