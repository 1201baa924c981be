"""The site is built once and opened in Chromium: every page, two widths, light and dark, search, charts, formulas, accessibility.

Pictures of the pages go to build/screenshots, which git ignores. Without Chromium, or without axe-core in
build/node_modules, the tests that need it are skipped; CL_NSCL_REQUIRE=browser,axe makes that a failure.
"""
import functools, html.parser, http.server, json, os, re, shutil, sys, threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import nbformat, pytest, yaml

ROOT = Path(__file__).resolve().parent.parent
SHOTS = ROOT/"build/screenshots"
sys.path[:0] = [str(ROOT/"tools"), str(ROOT/"tests")]
import docs
from browser import DESKTOP, PHONE, Browser, chromium
from conftest import need

MAIN = ["nbs/index.html", "nbs/learn/idea.html", "nbs/11_losses.html", "nbs/howto/objective.html", "results/index.html", "results/digits/01_alignment.html",
        "reference/losses.html", "nbs/architecture.html"]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if "CL_NSCL_SITE" in os.environ: return Path(os.environ["CL_NSCL_SITE"]) # one that is built already
    return docs.build_site(tmp_path_factory.mktemp("site")/"_docs")


@pytest.fixture(scope="session")
def pages(site): return sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if p.name != "summary.html")


@pytest.fixture(scope="session")
def url(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *a): pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    need("browser", "" if chromium() else "Chromium is not installed")
    b = Browser(tmp_path_factory.mktemp("chromium"))
    yield b
    b.close()


# ---------------------------------------------------------------- without a browser

class Links(html.parser.HTMLParser):
    def __init__(self): super().__init__(); self.ids, self.links, self.bare = set(), [], []
    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if "id" in a: self.ids.add(a["id"])
        self.links += [a[k] for k in ("href", "src") if a.get(k) and tag != "use"]
        if tag == "img" and not (a.get("alt") or "").strip(): self.bare.append(a.get("src", "")[:60])


def test_every_link_and_picture_of_the_site_exists(site):
    read, wrong = {}, []
    for p in site.rglob("*.html"):
        parser = Links(); parser.feed(p.read_text(encoding="utf-8")); read[p] = parser
    for p, parser in read.items():
        wrong += [f"{p.name}: picture without a text: {b}" for b in parser.bare if p.name != "summary.html"]
        for link in parser.links:
            if re.match(r"(https?:|mailto:|data:)", link) or link in ("#", ""): continue
            path, anchor = urldefrag(link)
            target = (p.parent/unquote(path)).resolve() if path else p
            if target.is_dir(): target = target/"index.html"
            if not target.exists(): wrong.append(f"{p.relative_to(site)}: {link}")
            elif anchor and target in read and unquote(anchor) not in read[target].ids: wrong.append(f"{p.relative_to(site)}: {link} (no such heading)")
    assert not wrong, "\n".join(wrong[:20])


def test_nothing_comes_from_a_network(site):
    for p in site.rglob("*.html"):
        found = re.findall(r'<(?:script|link|img)\b[^>]*(?:src|href)="(https?://[^"]+)', p.read_text(encoding="utf-8"))
        assert not found, f"{p.name}: {found}"
    assert (site/"site_libs/katex/fonts/KaTeX_Main-Regular.woff2").exists() and (site/"site_libs/vega.js").stat().st_size > 5e5


def test_every_notebook_and_every_module_has_a_page(site):
    for p in docs.sources(ROOT): assert (site/p.relative_to(ROOT)).with_suffix(".html").exists(), p
    import reference
    for module in reference.notebooks(): assert (site/f"reference/{module}.html").exists()


def test_results_of_a_data_set_are_drawn_from_their_specifications(site):
    "Each chart that an experiment saved is interactive on its page."
    from cl_nscl.report import load_results
    for folder in docs.data_sets(ROOT):
        for m in load_results(folder):
            page = site/folder.relative_to(ROOT)/f"{m['name']}.html"
            if page.exists(): assert page.read_text(encoding="utf-8").count('class="spec"') >= len(m["charts"]), page


@pytest.mark.parametrize("fault, says", [("error", "01_alignment.ipynb: a cell failed (ValueError: sick)"), ("failed", "02_classes.failed.ipynb: its execution failed"),
                                         ("title", "11_losses.ipynb: its first cell is not a title"), ("text", "11_losses.ipynb: not a notebook")])
def test_N05_a_failed_or_broken_notebook_stops_the_build(tmp_path, fault, says):
    "The output of a failed execution is no result, and no page; the message names the notebook."
    (tmp_path/"nbs").mkdir(); (tmp_path/"results/digits").mkdir(parents=True)
    shutil.copy(ROOT/"nbs/11_losses.ipynb", tmp_path/"nbs"); shutil.copy(ROOT/"results/digits/01_alignment.ipynb", tmp_path/"results/digits")
    docs.check(docs.sources(tmp_path), tmp_path)
    if fault == "error":
        nb = nbformat.read(p := tmp_path/"results/digits/01_alignment.ipynb", 4)
        next(c for c in nb.cells if c.cell_type == "code").outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="sick", traceback=[])]
        nbformat.write(nb, p)
    elif fault == "failed": shutil.copy(tmp_path/"results/digits/01_alignment.ipynb", tmp_path/"results/digits/02_classes.failed.ipynb")
    elif fault == "title":
        nb = nbformat.read(p := tmp_path/"nbs/11_losses.ipynb", 4); nb.cells = nb.cells[1:]; nbformat.write(nb, p)
    else: (tmp_path/"nbs/11_losses.ipynb").write_text("<<<<<<< ours")
    with pytest.raises(docs.Refused) as e: docs.stage(tmp_path, tmp_path/"stage")
    assert says in str(e.value) and not (tmp_path/"stage").exists()


def test_results_are_grouped_by_figure_with_marks_and_checks_apart(tmp_path):
    "Also results one folder deeper, under a title that says what they are; a failed notebook is no data set."
    for to in ("digits", "confirm/digits", "digits/failed"):
        (tmp_path/"results"/to).mkdir(parents=True)
        shutil.copy(ROOT/"results/digits/03_temperature.ipynb", tmp_path/"results"/to)
    row = lambda text, figure, verdict, **more: dict(claim=text, figure=figure, verdict=verdict, effect=0.5, low=0.1, high=0.9, seeds=20, unit="difference") | more
    claims = [row("b < c", "Figure 4", "undecided"), row("beside", "", "confirmed"), row("a", "Figure 2", "not confirmed"), row("a theorem", "", "holds", kind="check")]
    (tmp_path/"results/confirm/digits/03_temperature.json").write_text(json.dumps(dict(name="03_temperature", title="The temperature", files=[], params=dict(seeds=20), claims=claims)))
    assert [docs.name_of(d, tmp_path) for d in docs.data_sets(tmp_path)] == ["digits", "digits, fresh seeds"]
    text = docs.results_page(tmp_path)
    order = ["## digits {", "## digits, fresh seeds {#confirm-digits}", "20 seeds. 1 ✓ confirmed, 1 ✗ contradicted, 1 ? undecided", "](confirm/digits/03_temperature.ipynb)", "### Figure 2 {", "✗ contradicted</td><td>a<",
             "### Figure 4 {", '<tr class="undecided"><td>? undecided</td><td>b &lt; c<', "### Beyond the figures", "### Checks of theory and code", "✓ holds</td><td>a theorem<"]
    at = [text.index(part) for part in order]
    assert at == sorted(at)
    menu = docs.with_results(dict(website=dict(sidebar=dict(contents=["x", {"auto": "results/**"}]))), tmp_path)["website"]["sidebar"]["contents"][1]
    assert menu["href"] == "results/index.md" and menu["contents"][1] == dict(section="digits, fresh seeds", contents="results/confirm/digits/*.ipynb")


def test_code_of_executed_notebooks_is_folded(site):
    page = (site/"results/digits/03_temperature.html").read_text(encoding="utf-8")
    assert page.count("<summary>Code</summary>") > 3 and "<summary>Code</summary>" not in (site/"nbs/experiments/03_temperature.html").read_text(encoding="utf-8")


def test_comments_in_code_are_no_headings(site):
    assert docs.below_title("# a\n\n```bash\n# b\nls\n```\n\n# c") == "## a\n\n```bash\n# b\nls\n```\n\n## c"
    assert "## makes .venv" not in (site/"nbs/index.html").read_text(encoding="utf-8")


def test_charts_keep_their_ids_apart_and_say_what_they_show():
    svg = '<svg class="marks"><g id="a"/><rect fill="url(#a)"/><text>L</text><g aria-label="X-axis titled \'epoch\' for a linear scale"></g></svg>'
    one, two = docs.chart(svg), docs.chart(svg)
    own = [re.search(r'id="(c\d+-a)"', c)[1] for c in (one, two)]
    assert own[0] != own[1] and f"url(#{own[0]})" in one
    assert 'role="img" aria-label="X-axis titled' in one and 'data-label="X-axis titled' in one
    assert "<\\/script>" in docs.chart(svg, {"description": "d", "x": "</script>"})


QUARTO = """<!DOCTYPE html><html lang="en"><head><title>T</title><script src="https://cdn.jsdelivr.net/npm/katex@latest/dist/katex.min.js"></script></head><body>
<a class="flex-grow-1 no-decor" role="navigation">
  <h1 class="quarto-secondary-nav-title">T</h1>
</a>
<main><h1 class="title d-none d-lg-block">T</h1><div class="box">

<table class="caption-top table"><tr><td><code>int \\| None</code></td></tr></table>
</div><pre><code>a \\| b</code></pre></main></body></html>"""


@pytest.fixture
def quarto(tmp_path, monkeypatch):
    "A command of that name, which writes one page as Quarto writes it; fails if told so."
    command = tmp_path/"bin/quarto"
    command.parent.mkdir()
    (tmp_path/"page.html").write_text(QUARTO)
    command.write_text(f'#!/bin/sh\n[ -e {tmp_path}/fails ] && exit 1\nmkdir -p "$2/_site/nbs" && cp {tmp_path}/page.html "$2/_site/nbs/index.html" && echo first > "$2/_site/index.html"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    (tmp_path/"stage").mkdir(); shutil.copy(ROOT/"_quarto.yml", tmp_path/"stage")
    return tmp_path


def test_a_page_by_quarto_needs_no_network_and_has_one_title(quarto):
    docs.render(quarto/"stage", quarto/"_docs"); docs.finish(quarto/"_docs")
    page = (quarto/"_docs/nbs/index.html").read_text()
    assert "https:" not in page and "../site_libs/katex/katex.min.js" in page
    assert re.findall("<h1.*?>", page) == ['<h1 class="title">'] and page.count('<div class="box"><table') == page.count('class="box"') == 1
    assert "<code>int | None</code>" in page and "<pre><code>a \\| b</code></pre>" in page
    assert "url=nbs/index.html" in (quarto/"_docs/index.html").read_text()


def test_quarto_that_fails_leaves_the_site_as_it_was(quarto):
    (quarto/"fails").touch()
    with pytest.raises(docs.Refused, match="quarto render says why"): docs.render(quarto/"stage", quarto/"_docs")
    assert not (quarto/"_docs").exists()


def test_what_the_page_shows_is_markdown_or_text():
    "An output of HTML would make Quarto load require.js from a network; a comment in code is no heading."
    nb = docs.page(nbformat.read(ROOT/"nbs/index.ipynb", 4), "nbs")
    assert not [o for c in nb.cells for o in c.get("outputs", []) if "text/html" in o.get("data", {})]
    assert "\n# makes .venv" in "\n".join(c.source for c in nb.cells)


def test_the_pages_of_the_library_stand_in_the_sidebar_by_name():
    entries = docs.with_results(yaml.safe_load((ROOT/"_quarto.yml").read_text()), ROOT)["website"]["sidebar"]["contents"]
    library = next(e["contents"] for e in entries if e.get("section") == "Library")
    assert library[0] == "nbs/00_core.ipynb" and library == sorted(library)


# ---------------------------------------------------------------- in the browser

LOOK = """(() => {
  const seen = (e) => e.getClientRects().length > 0, wrong = [];
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`scrolls sideways: ${document.documentElement.scrollWidth} > ${innerWidth}`);
  for (const i of document.images) if (i.complete && !i.naturalWidth) wrong.push(`picture not shown: ${i.src.slice(0, 80)}`);
  for (const m of document.querySelectorAll('.math')) if (!m.querySelector('.katex') || m.querySelector('.katex-error')) wrong.push(`formula not shown: ${m.textContent.slice(0, 60)}`);
  if (/\\$[^$\\n]{1,60}\\\\[a-z]+[^$\\n]*\\$/.test([...document.querySelectorAll('main p, main li, main td')].map((e) => e.textContent).join('\\n').replace(/<annotation.*?<\\/annotation>/g, ''))) wrong.push('a formula is left as text');
  for (const f of document.querySelectorAll('figure.chart')) {
    const s = f.querySelector('svg'), n = s ? s.querySelectorAll('path, line, rect, text').length : 0;
    if (n < 5) wrong.push(`chart with ${n} marks`);
    else if (!(s.getAttribute('aria-label') || '').trim() || s.getAttribute('role') !== 'img') wrong.push('chart without a text');
    else if (seen(f) && s.getBoundingClientRect().width < 60) wrong.push('chart without width');
    if (s && seen(f)) {
      const box = f.querySelector('.drawn'), cut = s.getBoundingClientRect().right > innerWidth + 1;
      if (cut && !box.classList.contains('more')) wrong.push('chart cut off without a sign');
      if (f.getBoundingClientRect().right > innerWidth + 1 || box.getBoundingClientRect().right > innerWidth + 1) wrong.push('chart wider than the page');
      for (const l of s.querySelectorAll('.role-legend')) if (seen(l) && l.getBoundingClientRect().right > innerWidth + 1) wrong.push(`legend out of sight: ${l.textContent.slice(0, 40)}`);
      for (const l of s.querySelectorAll('.role-legend text')) if (/…$/.test(l.textContent)) wrong.push(`legend cut short: ${l.textContent}`);
      const small = Math.min(...[...s.querySelectorAll('text')].slice(0, 200).map((e) => parseFloat(getComputedStyle(e).fontSize) * s.getBoundingClientRect().width / s.viewBox.baseVal.width));
      if (small < 5.5) wrong.push(`letters of ${small.toFixed(1)} px`);
    }
    if (f.classList.contains('live') && !f.classList.contains('shown')) wrong.push('interactive chart not drawn');
  }
  for (const b of document.querySelectorAll('.box, pre, .katex-display')) if (seen(b) && (b.getBoundingClientRect().right > innerWidth + 1 || b.scrollWidth > b.clientWidth + 3 && !b.classList.contains('more'))) wrong.push(`cut off without a sign: ${b.textContent.trim().slice(0, 40)}`);
  if (document.querySelectorAll('h1').length !== 1) wrong.push(`${document.querySelectorAll('h1').length} titles`);
  return wrong;
})()"""


def visit(browser, url, pages, size, dark, name):
    wrong = []
    for page in pages:
        if page == "index.html": continue # leads on to the first page
        browser.open(f"{url}/{page}", size, dark)
        wrong += [f"{page}: {w}" for w in [*browser.run(LOOK), *browser.faults()]]
        browser.picture(SHOTS/name/f"{page.replace('/', '_')}.png", whole=page in MAIN)
    assert not wrong, "\n".join(wrong[:30])


def test_every_page_at_desktop_width(browser, url, pages): visit(browser, url, pages, DESKTOP, False, "desktop")
def test_every_page_at_phone_width(browser, url, pages): visit(browser, url, pages, PHONE, False, "phone")
def test_main_pages_in_the_dark(browser, url): visit(browser, url, MAIN, DESKTOP, True, "dark")


def test_the_first_page_leads_home(browser, url):
    browser.open(f"{url}/")
    browser.until("location.pathname == '/nbs/index.html'")


def test_search_finds_CKA(browser, url):
    browser.open(f"{url}/nbs/index.html")
    browser.until("!!document.querySelector('#quarto-search input')")
    browser.run("(() => { const i = document.querySelector('#quarto-search input'); i.focus(); i.value = 'CKA'; i.dispatchEvent(new Event('input', {bubbles: true})); })()")
    assert browser.until("document.querySelectorAll('.search-result, .search-result-link').length > 3")
    found = browser.run("[...document.querySelectorAll('.search-result, .search-result-link')].map((a) => a.getAttribute('href'))")
    assert any("21_similarity" in h or "similarity" in h for h in found), found


def test_light_and_dark_by_the_switch(browser, url):
    "The switch changes page and charts, and stays on the next page."
    paint = "[getComputedStyle(document.body).backgroundColor, document.querySelector('figure.chart.shown svg text').getAttribute('fill')]"
    browser.open(f"{url}/nbs/index.html")
    light = browser.run(paint)
    browser.run("document.querySelector('.quarto-color-scheme-toggle').click()")
    browser.until(f"({paint})[0] != '{light[0]}' && ({paint})[1] != '{light[1]}'")
    browser.open(f"{url}/nbs/learn/idea.html")
    browser.until("!!document.querySelector('html.quarto-dark, body.quarto-dark')")
    browser.run("document.querySelector('.quarto-color-scheme-toggle').click(); localStorage.clear()")


def test_hovering_shows_values(browser, url):
    browser.open(f"{url}/results/digits/01_alignment.html")
    at = browser.run("(() => { const p = document.querySelector('figure.chart.shown svg .mark-symbol.role-mark path'); p.scrollIntoView({block: 'center', behavior: 'instant'}); const r = p.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()")
    for dx in (3, 0): browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0] + dx, y=at[1])
    assert "epoch" in browser.until("(document.querySelector('#vg-tooltip-element.visible') || {}).textContent")
    browser.open(f"{url}/nbs/40_plots.html") # a chart without a specification shows what Vega wrote beside each mark
    at = browser.run("(() => { const p = document.querySelector('figure.chart:not(.live) svg .mark-symbol path[data-label*=epoch]'); p.scrollIntoView({block: 'center', behavior: 'instant'}); const r = p.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()")
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
    assert "epoch" in browser.until("!document.querySelector('.tip').hidden && document.querySelector('.tip').textContent")


def test_the_slider_of_the_idea_moves_the_chart(browser, url):
    browser.open(f"{url}/nbs/learn/idea.html")
    line = "document.querySelector('figure.chart.shown .mark-line path').getAttribute('d')"
    before = browser.run(line)
    browser.run("(() => { const i = document.querySelector('.vega-bind input'); i.value = 1.5; i.dispatchEvent(new Event('input')); })()")
    browser.until(f"{line} != '{before}'")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_no_serious_fault(browser, url, dark):
    axe = next((p for p in (ROOT/"build/node_modules/axe-core/axe.min.js", ROOT/"node_modules/axe-core/axe.min.js") if p.exists()), None)
    need("axe", "" if axe else "axe-core is not in build/node_modules")
    wrong = []
    for page in MAIN if not dark else MAIN[:2]:
        for size in (DESKTOP, PHONE) if not dark else (DESKTOP,):
            browser.open(f"{url}/{page}", size, dark)
            browser.run(axe.read_text(encoding="utf-8") + "; true")
            found = json.loads(browser.run("axe.run(document, {resultTypes: ['violations']}).then((r) => JSON.stringify(r.violations.filter((v) => ['serious', 'critical'].includes(v.impact))"
                                           ".map((v) => [v.id, v.impact, v.nodes.length, v.nodes[0].html.slice(0, 160), v.nodes[0].failureSummary.slice(0, 200)])))"))
            wrong += [f"{page} {size[0]}: {f}" for f in found]
    assert not wrong, "\n".join(wrong)
