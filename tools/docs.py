"""Build the site: from the notebooks, the results and _quarto.yml, with Quarto where it is installed, else with smalldocs.

    python tools/docs.py            the site, into the output folder that _quarto.yml names
    python tools/docs.py DIR        the same, into DIR
    python tools/docs.py serve      serve the site that was built

Three steps. `stage` copies the notebooks into a scratch folder and makes of each what a reader wants: hidden cells
go, a chart becomes its Vega-Lite spec where one is known, pages of reference, results and measurements are made. A
builder renders that folder by the same _quarto.yml. `finish` puts KaTeX, Vega, a style and a script beside the pages,
so that nothing is fetched from a network while reading.
"""
import functools, html, http.server, json, os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

import nbformat, yaml
from nbformat.v4 import new_output, new_raw_cell

ROOT = Path(__file__).resolve().parent.parent
WEB = ROOT/"tools/web"
VEGA = re.compile(r"application/vnd\.vegalite\.v\d+\+json")
CDN = re.compile(r"https://cdn\.jsdelivr\.net/npm/katex@[\w.]+/dist(?:/contrib)?/")


class Refused(SystemExit):
    "The site is not built; says why."


# ---------------------------------------------------------------- what is read

def sources(root: Path) -> list[Path]:
    "Every notebook of the site, and the executed ones that failed."
    found = [*(root/"nbs").rglob("*.ipynb"), *(root/"results").glob("*/*.ipynb"), *(root/"results").glob("*/*/*.ipynb")]
    return sorted(p for p in found if not any(part.startswith((".", "_")) or part == "failed" for part in p.relative_to(root).parts))


def check(paths: list[Path], root: Path) -> None:
    "Refuse notebooks that failed, that have no title, or that are no notebooks."
    wrong = []
    for p in paths:
        name = p.relative_to(root)
        try: nb = nbformat.read(p, 4)
        except Exception as e: wrong.append(f"{name}: not a notebook ({type(e).__name__})"); continue
        errors = [o for c in nb.cells for o in c.get("outputs", []) if o.output_type == "error"]
        if errors: wrong.append(f"{name}: a cell failed ({errors[0].ename}: {errors[0].evalue})")
        elif p.name.endswith(".failed.ipynb"): wrong.append(f"{name}: its execution failed")
        elif not nb.cells or not re.match(r"# \S.*\n\n> \S", nb.cells[0].source): wrong.append(f"{name}: its first cell is not a title and a one-line description")
    if wrong: raise Refused("the site is not built:\n  " + "\n  ".join(wrong))


def specs_of(folder: Path) -> list[tuple[str, dict]]:
    "The charts of a results folder: each SVG without its ids, and its Vega-Lite spec."
    return [(_plain(svg.read_text(encoding="utf-8")), json.loads(svg.with_suffix(".json").read_text(encoding="utf-8")))
            for svg in sorted(folder.glob("*.svg")) if svg.with_suffix(".json").exists()]


def _plain(svg): # what is drawn, without ids and without the texts at the marks
    return re.sub(r"<svg[^>]*>", "<svg>", re.sub(r' (?:role|aria-[a-z]+)="[^"]*"', "", re.sub(r'(\bid="|url\(#|href="#)[^")]+', r"\1", svg)))


# ---------------------------------------------------------------- a chart

def described(svg: str) -> str:
    "A text for those who cannot see a chart: its title, axes and legends, from what Vega writes into the SVG."
    parts = [html.unescape(t) for t in re.findall(r'aria-label="((?:Title text|[XY]-axis|Symbol legend|Gradient legend)[^"]*)"', svg)]
    parts = [re.sub(r"^Title text '(.*)'$", r"\1", p) for p in dict.fromkeys(parts)]
    words = [html.unescape(w) for w in re.findall(r"<text[^>]*>([^<]+)</text>", svg)]
    return ". ".join(parts) or "Chart: " + ", ".join(list(dict.fromkeys(words))[:12]) or "Chart"


@functools.cache
def _numbers(): return iter(range(10**6))


def chart(svg: str, spec: dict | None = None) -> str:
    "The HTML of a chart: the SVG, which a script replaces by the interactive chart where there is a spec."
    own = f"c{next(_numbers())}-"
    svg = re.sub(r'(\bid="|url\(#|(?:xlink:)?href="#)([^")]+)', rf"\1{own}\2", svg[svg.index("<svg"):])
    about = (spec or {}).get("description") or described(svg)
    svg = re.sub(r' (?:role|aria-roledescription)="[^"]*"', "", svg).replace(' aria-label="', ' data-label="') # one picture, one text; the script shows the marks' own
    svg = re.sub(r"<svg\b", f'<svg role="img" aria-label="{html.escape(about)}"', svg, count=1)
    data = json.dumps(spec, separators=(",", ":")).replace("</", "<\\/") if spec else ""
    more = f'<script type="application/json" class="spec">{data}</script>' if spec else ""
    return f'<figure class="chart{" live" if spec else ""}"><div class="drawn">{svg}</div>{more}</figure>'


def _output(o, specs, about, here):
    "An output, of a notebook in the folder `here`, as the site shows it; `about` is the text of a picture that is no chart."
    data = o.get("data", {})
    svg = "".join(data.get("image/svg+xml", ""))
    if svg:
        spec = next((data[m] for m in data if VEGA.fullmatch(m)), None) or next((s for plain, s in specs if plain == _plain(svg)), None)
        return _raw(chart(svg, spec))
    if "text/html" in data:
        text = re.sub(r"<style scoped>.*?</style>", "", "".join(data["text/html"]), flags=re.S)
        return _raw(re.sub(r' (?:border="1"|style="text-align: right;")', "", text))
    if "text/markdown" in data: data["text/markdown"] = figures("".join(data["text/markdown"]), here)
    elif kind := next((k for k in ("image/png", "image/jpeg") if k in data), None):
        return _raw(f'<img class="img-fluid" alt="{html.escape(about)}" src="data:{kind};base64,{"".join(data[kind]).strip()}">')
    return o


def _raw(text): return new_output("display_data", {"text/markdown": f"```{{=html}}\n{text}\n```\n"}) # for an output of HTML Quarto would load require.js from a network


# ---------------------------------------------------------------- a page

def page(nb, here: str, specs=(), home: str = "", note: str = "", folded: bool = False) -> nbformat.NotebookNode:
    "The notebook as a page: title and description in front, hidden cells gone, charts as figures. Links are written from `home`; code may be `folded`."
    title, about = re.match(r"# (.*)\n\n> (.*)", nb.cells[0].source).groups()
    rest = nb.cells[0].source.split("\n", 3)[3:]
    nb.cells[0] = new_raw_cell("---\n" + yaml.safe_dump(dict(title=title, description=about), allow_unicode=True, width=10**6) + "---\n", id="front")
    cells, said = [nb.cells[0]], title
    if note or rest: cells.append(nbformat.v4.new_markdown_cell("\n\n".join([*rest, note]).strip(), id="note"))
    for c in nb.cells[1:]:
        words = re.findall(r"^#\|\s*(\w+)(?::\s*(\w+))?", c.source, re.M) if c.cell_type == "code" else []
        if ("hide", "") in words or any(w == "default_exp" for w, _ in words): continue
        if c.cell_type == "markdown":
            said = re.sub(r"[*_`$#]|\]\([^)]*\)|\[", "", c.source.strip().split("\n\n")[-1]).strip() or said
            c.source = below_title(figures(links(c.source, here, home or here), here))
        if c.cell_type == "code":
            hidden = ("echo", "false") in words
            body = re.sub(r"^#\|.*\n?", "", c.source, flags=re.M).strip("\n")
            tags, alt = c.metadata.get("tags", []), re.search(r"^#\| fig-alt: (.*)", c.source, re.M)
            fold = {"parameters": "The notebook's own parameters", "injected-parameters": "The parameters of this execution"}
            keep = "".join(f"{l}\n" for l in c.source.splitlines() if re.match(r"#\| (?:code-fold|code-summary):", l))
            if folded and not keep and not tags: keep = "#| code-fold: true\n#| code-summary: Code\n"
            top = "#| echo: false\n" + keep if hidden else keep + "".join(f"#| code-fold: true\n#| code-summary: {fold[t]}\n" for t in fold if t in tags)
            c.source, c.outputs = top + body, [_output(o, specs, alt[1].strip() if alt else said, here) for o in c.outputs]
            if not body and not c.outputs: continue
        cells.append(c)
    nb.cells = cells
    return nb


def below_title(text: str) -> str:
    "Headings of the first rank become those of the second, since the page has a title; comments in code stay as they are."
    return "".join(t if i % 2 else re.sub(r"^# ", "## ", t, flags=re.M) for i, t in enumerate(re.split(r"(^```.*?^```)", text, flags=re.M | re.S)))


def links(text: str, here: str, home: str) -> str:
    "Relative links of a notebook that was written in the folder `home` and lies in `here`."
    def moved(m):
        if re.match(r"[a-z]+:|#|/", m[2]): return m[0]
        path, _, anchor = m[2].partition("#")
        target = os.path.normpath(f"{home}/{path}")
        target = {"bench": "bench/index.md", "results": "results/index.md", "LICENSE": "LICENSE.txt"}.get(target, target)
        return f"{m[1]}{os.path.relpath(target, here)}{'#' + anchor if anchor else ''}{m[3]}"
    code = re.split(r"(```.*?```|`[^`\n]+`)", text, flags=re.S)
    one = lambda t: re.sub(r'((?:src|href)=")([^"]+)(")', moved, re.sub(r"(\]\()([^)\s]+)(\))", moved, t))
    return "".join(t if i % 2 else one(t) for i, t in enumerate(code))


def figures(text: str, here: str) -> str:
    "Pictures of charts become the charts themselves."
    def live(m):
        svg = (ROOT/here/(re.search(r'src="([^"]+)"', m[0]) or re.search(r"\(([^)]+)", m[0]))[1]).resolve()
        spec = svg.with_suffix(".json")
        if svg.suffix != ".svg" or not spec.exists(): return m[0]
        return f"\n```{{=html}}\n{chart(svg.read_text(encoding='utf-8'), json.loads(spec.read_text(encoding='utf-8')))}\n```\n"
    return re.sub(r"<img [^>]*>|!\[[^\]]*\]\([^)]+\)", live, text)


# ---------------------------------------------------------------- pages that are made

MARKS = {"confirmed": "✓ confirmed", "seen (one seed)": "✓ seen, one seed", "not confirmed": "✗ contradicted", "not seen (one seed)": "✗ not seen, one seed",
         "undecided": "? undecided", "holds": "✓ holds", "fails": "✗ fails"}
EXTRA = {"confirm": "fresh seeds"} # a folder of data sets within results: what its name stands for


def results_page(root: Path) -> str:
    "The claims of every data set, by figure, and links to its executed notebooks."
    text = ["---\ntitle: Results\ndescription: Every claim of the paper, with an interval and a verdict, for each data set.\n---\n",
            "A verdict comes from the 95 % interval over seeds: *confirmed* where it lies on the claimed side of zero, *contradicted* where it lies on the other, "
            "*undecided*, in grey, where it holds zero; for a claim that names a margin, such as *falls by less than 0.05*, the margin takes the place of zero. With one seed there is no interval, and a claim is *seen* or *not seen*.\n"]
    for folder in data_sets(root): text += data_set(folder, root)
    return "\n".join(text)


def data_set(folder: Path, root: Path) -> list[str]:
    "One data set's part of the page of results."
    from cl_nscl.report import load_results, multiplicity
    manifests, at = load_results(folder), folder.relative_to(root/"results").as_posix()
    seeds, slug = sorted({m["params"].get("seeds", 1) for m in manifests}), at.replace("/", "-")
    claims = [(m, c) for m in manifests for c in m["claims"]]
    of = lambda kind: [(m, c) for m, c in claims if c.get("kind", "finding") == kind]
    said = {k: n for k in MARKS if (n := sum(c["verdict"] == k for _, c in of("finding")))}
    text = [f"## {name_of(folder, root)} {{#{slug}}}\n", f"{', '.join(map(str, seeds))} seed{'s' if seeds != [1] else ''}. " + ", ".join(f"{n} {MARKS[k]}" for k, n in said.items())
            + f". {multiplicity([c for _, c in of('finding')])}\n"]
    done = [m for m in manifests if (folder/f"{m['name']}.ipynb").exists()]
    text += ["The executed notebooks: " + ", ".join(f"[{m['title']}]({at}/{m['name']}.ipynb)" for m in done) + ".\n"] if done else []
    key = lambda f: (not f.startswith("Figure"), not f.startswith("Table"), not f, f)
    for figure in sorted({c["figure"] for _, c in of("finding")}, key=key):
        rows = [c for _, c in of("finding") if c["figure"] == figure]
        text += [f"### {figure[:1].upper() + figure[1:] or 'Beyond the figures'} {{#{slug}-{re.sub('[^a-z0-9]+', '-', figure.lower()) or 'beyond'}}}\n", claims_rows(rows)]
    if checks := [c for _, c in of("check")]:
        text += [f"### Checks of theory and code {{#{slug}-checks}}\n", "What must hold because it is a theorem or an identity; in every seed, or it fails.\n", claims_rows(checks)]
    return text


def claims_rows(claims: list[dict]) -> str:
    "Claims as a table of HTML, a mark for each verdict, the undecided in grey."
    from cl_nscl.report import number
    cell = lambda c: f'<tr class="{c["verdict"].split()[0]}"><td>{MARKS[c["verdict"]]}</td><td>{html.escape(c["claim"])}</td><td>{number(c["effect"], c["low"], c["high"])}</td><td>{html.escape(c["unit"])}</td></tr>'
    head = "<thead><tr><th>verdict</th><th>claim</th><th>effect</th><th>unit</th></tr></thead>"
    return f'```{{=html}}\n<div class="box"><table class="claims">{head}<tbody>{"".join(map(cell, claims))}</tbody></table></div>\n```\n'


def name_of(folder: Path, root: Path) -> str:
    "What a folder of results is called: digits; digits, fresh seeds."
    *above, name = folder.relative_to(root/"results").parts
    return ", ".join([name, *(EXTRA.get(a, a) for a in above)])


def with_results(config: dict, root: Path) -> dict:
    "The settings of the site, with a section of the sidebar for each folder of results that is there, in place of `auto`, and the pages in place of a pattern."
    parts = [dict(section=name_of(d, root), contents=f"{d.relative_to(root).as_posix()}/*.ipynb") for d in data_sets(root)]
    entries = config["website"]["sidebar"]["contents"]
    entries[:] = [dict(section="Results", href="results/index.md", contents=parts) if e == {"auto": "results/**"} else e for e in entries]
    for e in entries: # a pattern of names, such as [0-9]*, would be one level more in Quarto
        if isinstance(e, dict) and isinstance(e.get("contents"), str) and "[" in e["contents"]: e["contents"] = [p.relative_to(root).as_posix() for p in sorted(root.glob(e["contents"]))]
    return config


def data_sets(root: Path) -> list[Path]:
    "The folders of results that hold an executed notebook; those of whole studies first."
    found = {p.parent for p in sources(root) if p.is_relative_to(root/"results") and re.match(r"\d", p.name)}
    return sorted(found, key=lambda d: (len(d.parts), d))


def bench_page(root: Path) -> str:
    "The tables of measurements, one after another."
    files = {p.stem: p.read_text(encoding="utf-8") for p in sorted((root/"bench").glob("*.md"))}
    tables = [t if t.startswith("# ") else f"# {name.capitalize()}\n\n{t}" for name, t in files.items()]
    return "\n\n".join(["---\ntitle: Measurements\ndescription: How fast, how much memory, beside other libraries.\n---", *map(below_title, tables)]) + "\n"


# ---------------------------------------------------------------- the three steps

def stage(root: Path, to: Path) -> None:
    "Copy everything that the builder reads into `to`."
    paths = sources(root)
    check(paths, root)
    for p in paths:
        rel = p.relative_to(root)
        executed, here = rel.parts[0] == "results", rel.parent.as_posix()
        note = ""
        if here == "nbs/experiments":
            done = [f"[{name_of(d, root)}](../../{d.relative_to(root).as_posix()}/{p.name})" for d in data_sets(root) if (d/p.name).exists()]
            note = f"Executed on {', '.join(done)}." if done else ""
        nb = page(nbformat.read(p, 4), here, specs_of(p.parent) if executed else (), "nbs/experiments" if executed else "", note, executed)
        (to/rel).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, to/rel)
    sys.path[:0] = [str(root), str(ROOT/"tools")]
    import reference
    made = {"results/index.md": results_page(root), "bench/index.md": bench_page(root)} | reference.pages(root)
    for name, text in made.items():
        (to/name).parent.mkdir(parents=True, exist_ok=True)
        (to/name).write_text(text, encoding="utf-8")
    title = "---\ntitle: Changelog\ndescription: What changed, version by version.\n---\n"
    (to/"CHANGELOG.md").write_text(title + re.sub(r"^# .*\n", "", (root/"CHANGELOG.md").read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copy(root/"LICENSE", to/"LICENSE.txt")
    (to/"_quarto.yml").write_text(yaml.safe_dump(with_results(yaml.safe_load((root/"_quarto.yml").read_text(encoding="utf-8")), root), sort_keys=False))
    for d in data_sets(root):
        for f in [*d.glob("*.csv"), *d.glob("*.html"), *d.glob("*.svg"), *d.glob("*.png")]: shutil.copy(f, to/f.relative_to(root))
    for name in ("site.css", "dark.scss", "favicon.svg"):
        (to/"tools/web").mkdir(parents=True, exist_ok=True); shutil.copy(WEB/name, to/"tools/web")


def render(folder: Path, out: Path) -> None:
    "Let Quarto or smalldocs render the staged folder."
    config = yaml.safe_load((folder/"_quarto.yml").read_text())
    config.pop("ipynb-filters", None) # the pages are ready
    config["project"]["output-dir"] = "_site"
    if shutil.which("quarto"):
        (folder/"_quarto.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        if subprocess.run(["quarto", "render", str(folder), "--no-execute"]).returncode: raise Refused("the site is not built: quarto render says why")
    else:
        from smalldocs.site import build
        for key in ("html-math-method", "respect-user-color-scheme"): config["format"]["html"].pop(key, None) # it does both unasked
        (folder/"_quarto.yml").write_text(yaml.safe_dump(config, sort_keys=False))
        site = build(folder, quiet=True)
        if site.warnings: raise Refused("the site is not built:\n  " + "\n  ".join(site.warnings))
    if out.exists(): shutil.rmtree(out)
    shutil.copytree(folder/"_site", out)


def finish(out: Path) -> None:
    "Style, script, KaTeX and Vega from the site itself; tables in boxes of their own; the first page at the top."
    import vl_convert
    libs = out/"site_libs"
    shutil.copytree(WEB/"katex", libs/"katex", dirs_exist_ok=True)
    shutil.copy(WEB/"site.js", libs/"site.js")
    (libs/"vega.js").write_text(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"), encoding="utf-8")
    for p in out.rglob("*.html"):
        if p.relative_to(out).parts[0] == "site_libs" or p.name == "summary.html": continue
        up = "../" * (len(p.relative_to(out).parts) - 1)
        text = CDN.sub(f"{up}site_libs/katex/", p.read_text(encoding="utf-8"))
        text = re.sub(r'<div class="box">\s*(<table\b.*?</table>)\s*</div>', r"\1", text, flags=re.S)
        text = re.sub(r"(<table\b.*?</table>)", r'<div class="box">\1</div>', text, flags=re.S)
        text = re.sub(r"(?<!<pre>)<code>[^<]*</code>", lambda m: m[0].replace("\\|", "|"), text) # a table's code needs the backslash, and Quarto shows it
        text = text.replace('role="navigation" aria-expanded', 'role="button" tabindex="0" aria-expanded')
        text = re.sub(r'<h1 class="quarto-secondary-nav-title.*?</h1>', "", text, flags=re.S).replace('class="title d-none d-lg-block"', 'class="title"') # one title, on the page
        vega = f'<script src="{up}site_libs/vega.js" defer></script>' if 'class="spec"' in text else ""
        p.write_text(text.replace("</head>", f'{vega}<script src="{up}site_libs/site.js" defer></script></head>', 1), encoding="utf-8")
    (out/"index.html").write_text('<!doctype html><html lang="en"><meta charset="utf-8"><title>cl_nscl</title><meta http-equiv="refresh" content="0; url=nbs/index.html">'
                                  '<p><a href="nbs/index.html">cl_nscl</a></p></html>\n', encoding="utf-8")


def build_site(out: Path | None = None, root: Path = ROOT) -> Path:
    "All three steps."
    out = out or root/yaml.safe_load((root/"_quarto.yml").read_text())["project"]["output-dir"]
    with tempfile.TemporaryDirectory(prefix="site-") as tmp:
        stage(root, Path(tmp)); render(Path(tmp), out); finish(out)
    return out


def serve(out: Path, port: int = 8000) -> None:
    "Serve the site on this machine."
    if not (out/"index.html").exists(): raise Refused("there is no site yet: make docs")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(out))
    for port in range(port, port + 20):
        try: server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
        except OSError: continue
        print(f"http://127.0.0.1:{port}/ (Ctrl-C stops it)", flush=True)
        try: return server.serve_forever()
        except KeyboardInterrupt: return
    raise Refused(f"ports {port - 19} to {port} are all in use")


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]: serve(ROOT/yaml.safe_load((ROOT/"_quarto.yml").read_text())["project"]["output-dir"])
    else:
        site = build_site(Path(sys.argv[1]).resolve() if sys.argv[1:] else None)
        print(f"{sum(1 for _ in site.rglob('*.html'))} pages: {os.path.relpath(site)}")
