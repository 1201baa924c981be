"""The reference pages, made from the code: every public name with its arguments, shapes, units, errors and source.

What a page says comes from the docstring, from the comments beside the arguments (docments), from the limits that a
parameter is declared with, and from the `raise` statements of a function and of what it calls in its own module.
"""
import ast, dataclasses, functools, inspect, re, types, typing
from importlib import import_module
from pathlib import Path

import nbformat
from fastcore.docments import docments

ROOT = Path(__file__).resolve().parent.parent
EMPTY = inspect.Parameter.empty
SAME = { # what a word means wherever the code leaves it without a comment
    "device": "Where models and data live: `cpu`, `cuda`, `cuda:1`", "folder": "A folder of results", "model": "A module, on its device",
    "values": "Parameters by name, which win over the files", "tables": "Name -> table, as it is shown", "charts": "Name -> chart", "claims": "Rows as `claim` makes them"}


def notebooks(root: Path = ROOT) -> dict[str, Path]:
    "Module name -> its notebook, in reading order."
    found = {}
    for p in sorted((root/"nbs").glob("[0-9]*.ipynb")):
        name = re.search(r"#\|\s*default_exp (\w+)", "\n".join(c.source for c in nbformat.read(p, 4).cells if c.cell_type == "code"))
        if name: found[name[1]] = p
    return found


@functools.cache
def promised(root: Path = ROOT) -> dict[str, list[str]]:
    "Module name -> the names that the README's table of public names lists."
    rows = re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \|$", (root/"README.md").read_text(encoding="utf-8"), re.M)
    return {m: re.findall(r"`(\w+)`", names) for m, names in rows}


def names(module: str, root: Path = ROOT) -> list[str]:
    "Every public name of a module: the promised ones first."
    first = promised(root).get(module, [])
    return first + [n for n in import_module(f"cl_nscl.{module}").__all__ if n not in first]


# ---------------------------------------------------------------- errors

def _message(node):
    "What an exception says; … stands for what is filled in."
    if isinstance(node, ast.Constant): return str(node.value)
    if isinstance(node, ast.JoinedStr): return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
    if isinstance(node, ast.BinOp): return _message(node.left) + _message(node.right)
    return "…"


@functools.cache
def _defined(module): return {n.name: n for n in ast.parse(inspect.getsource(import_module(f"cl_nscl.{module}"))).body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}

def errors(module: str, name: str) -> list[tuple[str, str]]:
    "Exception and message of each `raise` that a function can reach within its own module; its methods' for a class."
    defined, seen, found, todo = _defined(module), set(), [], [name]
    while todo:
        if (n := todo.pop(0)) in seen or n not in defined: continue
        seen.add(n)
        for node in ast.walk(defined[n]):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                found.append((ast.unparse(node.exc.func), _message(node.exc.args[0]) if node.exc.args else ""))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                todo.append(node.func.id)
                if node.func.id == "pick": found.append(("UserError", f"unknown {_message(node.args[2])} …; valid: …"))
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------- one entry

def shown(value: object) -> str:
    "A default or an annotation, as the code would write it."
    if value in (EMPTY, None) or value is type(None): return "" if value is EMPTY else "None"
    if isinstance(value, type) and not hasattr(value, "__args__"): return value.__name__
    if callable(value) and hasattr(value, "__name__") and not typing.get_args(value): return value.__name__
    if isinstance(value, frozenset): return f"{{{', '.join(map(repr, sorted(value)))}}}"
    return re.sub(r"\b(?:cl_nscl\.\w+|typing|collections\.abc|pathlib|torch(?=\.Tensor)|torch\.nn\.modules\.\w+|pandas(?:\.\w+)*|altair(?:\.\w+)+)\.", "", str(value) if not isinstance(value, str) else value)


def _code(text): return f"`{' '.join(str(text).split())}`".replace("|", "\\|")
def _cell(text): return _whole(" ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;"))
def _whole(text): return "".join(t if i % 2 else t.replace("--", "-<!-- -->-") for i, t in enumerate(re.split(r"(`[^`]*`)", text))) # an option keeps both its dashes
def _verbatim(text): return _whole(re.sub(r"([\\`*_\[\]#.|'\"~$^<>])", r"\\\1", " ".join(text.split()))) # no quote and no formula of Markdown's making


def arguments(thing: object) -> list[tuple[str, str, str, str]]:
    "Name, type, default and meaning of each argument; the last row is what is returned."
    if dataclasses.is_dataclass(thing) and any("doc" in f.metadata for f in dataclasses.fields(thing)):
        return [(f.name, shown(f.type), repr(f.default), limits(f)) for f in dataclasses.fields(thing)]
    try: given = docments(thing, full=True)
    except (TypeError, ValueError): return []
    back = "" if inspect.isclass(thing) else "returns"
    rows, made = [], {f.name: f.default_factory() for f in dataclasses.fields(thing) if f.default_factory is not dataclasses.MISSING} if dataclasses.is_dataclass(thing) else {}
    for name, d in given.items():
        if name in ("self", "cls") or name == "return" and (not back or (d.anno in (EMPTY, None) and not d.docment)): continue
        default = repr(made[name]) if name in made else "" if name == "return" or d.default is EMPTY else repr(d.default) if not callable(d.default) else d.default.__name__
        rows.append((back if name == "return" else name, shown(d.anno), re.sub(r" at 0x\w+", "", default), d.docment or SAME.get(name) or of_type(d.anno)))
    return rows


def of_type(anno: object) -> str:
    "What an argument is whose type says it all: the docstring of a class of the package, or of a chart."
    if typing.get_args(anno) and typing.get_origin(anno) in (typing.Union, types.UnionType): return "; or ".join(filter(None, map(of_type, typing.get_args(anno))))
    if not inspect.isclass(anno): return ""
    if anno.__module__.startswith("cl_nscl."):
        about, module = (inspect.getdoc(anno) or "").splitlines()[0], anno.__module__.split(".")[1]
        return f"[{anno.__name__}]({module}.md#{anno.__name__}): {about[:1].lower() + about[1:]}" if anno.__name__ in import_module(anno.__module__).__all__ else about
    return "A chart" if "Chart" in anno.__name__ else ""


def limits(f: dataclasses.Field) -> str:
    "Meaning and valid values of a parameter."
    m = f.metadata
    ends = [f"{s} {m[k]:g}" for k, s in (("lo", "at least"), ("above", "above"), ("hi", "at most")) if m[k] is not None]
    return m["doc"] + (f"; one of {', '.join(m['choices'])}" if m["choices"] else f" ({', '.join(ends)})" if ends else "")


def table(rows: list[tuple[str, str, str, str]]) -> str:
    "The arguments as a Markdown table."
    if not rows: return ""
    code = lambda t: _code(t) if t else ""
    lines = [f"| {'*returns*' if n == 'returns' else code(n)} | {_cell(doc)} | {code(a)} | {code(d)} |" for n, a, d, doc in rows]
    return "\n".join(["| argument | meaning, shape, unit | type | default |", "|---|---|---|---|", *lines])


def constant(module: str, name: str, value: object) -> str:
    "What a constant holds, and the comment beside it."
    line = next((l for l in inspect.getsource(import_module(f"cl_nscl.{module}")).splitlines() if re.match(rf"{name}\b[^=]*=", l)), "")
    note = line.split("# ", 1)[1] if "# " in line else ""
    if isinstance(value, dict): held = f"A dictionary: {', '.join(f'`{k}`' for k in value)}." if value else "A dictionary."
    elif isinstance(value, (tuple, list)): held = _code(value) if len(str(value)) < 200 else f"{len(value)} items."
    else: held = _code(shown(value))
    return "\n\n".join(filter(None, [note[:1].upper() + note[1:] + "." if note else "", held]))


def members(klass: type) -> list[str]:
    "The public methods and properties of a class, one paragraph each."
    out = []
    for n, m in vars(klass).items():
        if n.startswith("_"): continue
        fn = m.fget if isinstance(m, property) else getattr(m, "__func__", m)
        if not inspect.isfunction(fn): continue
        sig = "" if isinstance(m, property) else "(" + ", ".join(p for p in inspect.signature(fn).parameters if p not in ("self", "cls")) + ")"
        out.append(f"- `.{n}{sig}`" + (f": {inspect.getdoc(fn).splitlines()[0]}" if inspect.getdoc(fn) else ""))
    return out


def entry(module: str, name: str, notebook: Path) -> str:
    "One name: signature, docstring, arguments, errors, source."
    thing = getattr(import_module(f"cl_nscl.{module}"), name)
    parts = [f"## {name} {{#{name}}}"]
    if not (inspect.isfunction(thing) or inspect.isclass(thing)): return "\n\n".join([*parts, constant(module, name, thing)])
    parts.append(_cell(inspect.getdoc(thing) or ""))
    rows = [] if inspect.isclass(thing) and issubclass(thing, Exception) else arguments(thing)
    parts.append(table(rows))
    if inspect.isclass(thing): parts.append("\n".join(members(thing)))
    if said := errors(module, name): parts.append("**Errors**\n\n" + "\n".join(f"- `{kind}`: {_verbatim(text)}" for kind, text in said))
    try: code = inspect.getsource(thing).rstrip()
    except (OSError, TypeError): code = ""
    if code: parts.append(f"```{{=html}}\n<details><summary>Source</summary>\n```\n\n````python\n{code}\n````\n\n```{{=html}}\n</details>\n```")
    return "\n\n".join(filter(None, parts))


def pages(root: Path = ROOT) -> dict[str, str]:
    "File name -> Markdown: a page for each module."
    out = {}
    for number, (module, notebook) in enumerate(notebooks(root).items()):
        about = (import_module(f"cl_nscl.{module}").__doc__ or "").strip()
        head = f"---\ntitle: \"{module}\"\ndescription: \"{about}\"\norder: {number}\n---\n\nImport from `cl_nscl.{module}`; explained in [{notebook.stem}](../nbs/{notebook.name}).\n"
        first = promised(root).get(module, [])
        body = [entry(module, n, notebook) for n in names(module, root)]
        if first and len(body) > len(first): body.insert(len(first), "## Also exported {.unlisted}\n\nUsed by other modules of the package; these may change.")
        out[f"reference/{module}.md"] = "\n\n".join([head, *body]) + "\n"
    return out
