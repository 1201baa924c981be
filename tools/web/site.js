// Charts become interactive, in the colours of the page; boxes that scroll can be reached by keyboard.
(() => {
  "use strict";
  const root = document.documentElement;
  const isDark = () => root.dataset.scheme === "alternate" || document.body.classList.contains("quarto-dark");
  const isNarrow = () => window.innerWidth < 620;

  // on a phone, panels stand below each other
  const stacked = (spec) => {
    if (Array.isArray(spec)) return spec.map(stacked);
    if (!spec || typeof spec !== "object") return spec;
    const out = {};
    for (const [k, v] of Object.entries(spec)) out[k === "hconcat" ? "vconcat" : k] = k === "datasets" || k === "data" ? v : stacked(v);
    if (typeof out.columns === "number" && out.facet) out.columns = 1;
    if (out.orient === "bottom" && typeof out.columns === "number") out.columns = NaN; // a legend: as many columns as its words allow
    return out;
  };
  const legends = (spec) => {
    const names = JSON.stringify(spec).match(/"domain":\["[^\]]*\]/g) || [];
    const longest = Math.max(0, ...names.flatMap((n) => JSON.parse(n.slice(9)).map((w) => String(w).length)));
    return JSON.parse(JSON.stringify(spec, (k, v) => (Number.isNaN(v) ? (longest > 16 ? 1 : 2) : v)));
  };

  // panels become narrower until they fit; letters keep their size
  const across = (s) => s.hconcat ? s.hconcat.reduce((sum, p) => sum + across(p), 0) : s.vconcat ? Math.max(...s.vconcat.map(across)) : typeof s.width === "number" ? s.width : s.layer ? Math.max(...s.layer.map(across)) : 0;
  const narrowed = (s, f) => {
    const out = { ...s };
    if (typeof out.width === "number") out.width = Math.round(out.width * f);
    for (const k of ["hconcat", "vconcat", "layer"]) if (out[k]) out[k] = out[k].map((p) => narrowed(p, f));
    return out;
  };
  const hasAxes = (spec) => !/"axis":null/.test(JSON.stringify(spec)); // a drawing without axes, such as a graph, keeps its size
  // the smallest that a chart is drawn, as a share of its size, before its box scrolls
  const settled = (svg, room, least) => {
    const w = svg.viewBox.baseVal.width || room;
    svg.style.minWidth = (room / w >= least ? Math.min(room, w) : Math.min(w, 0.9 * w)) + "px";
  };
  // black ink is light on a dark page, and so are the darker colours of lines
  const LIGHT = { "black": "#f0f0f0", "#000000": "#f0f0f0", "#444444": "#b9c0c8", "#882255": "#d07fa5", "#AA4499": "#cf7fc3", "#6A51A3": "#a594d6", "#117733": "#5dbe7d", "#A6611A": "#d99a5b" };
  const inked = (spec) => JSON.parse(JSON.stringify(spec).replace(/"(?:black|#[0-9A-F]{6})"/g, (c) => JSON.stringify(LIGHT[JSON.parse(c)] || JSON.parse(c))));
  const config = (dark, narrow) => {
    const ink = dark ? "#d9dde2" : "#1b1f23", soft = dark ? "#3a4149" : "#d5d9dd";
    return {
      background: "transparent", tooltipFormat: { numberFormat: ".4~r" }, mark: { tooltip: { content: "encoding" } }, font: "system-ui, sans-serif", view: { stroke: soft },
      axis: { labelColor: ink, titleColor: ink, gridColor: soft, domainColor: soft, tickColor: soft },
      legend: { labelColor: ink, titleColor: ink, labelLimit: 0, ...(narrow ? { columns: 2, orient: "bottom" } : {}) },
      header: { labelColor: ink, titleColor: ink }, title: { color: ink, subtitleColor: ink, fontSize: 13 },
      text: { color: ink }, rule: { color: ink },
    };
  };
  const words = (text, n) => text.split(" ").reduce((lines, w) => { (lines[lines.length - 1] + " " + w).length > n ? lines.push(w) : (lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + w); return lines; }, [""]);
  const folded = (t) => typeof t === "string" ? words(t, 44) : Array.isArray(t) ? t.flatMap((x) => words(x, 52)) : t;

  const show = async (figure) => {
    const spec = JSON.parse(figure.querySelector("script.spec").textContent), dark = isDark(), narrow = isNarrow();
    const own = spec.config || {};
    let chart = narrow ? legends(stacked(spec)) : spec;
    if (dark) chart = inked(chart);
    if (narrow && chart.title) chart = { ...chart, title: typeof chart.title === "object" && !Array.isArray(chart.title) ? { ...chart.title, text: folded(chart.title.text), subtitle: folded(chart.title.subtitle) } : folded(chart.title) };
    const drawn = document.createElement("div");
    const keep = { ...own }; delete keep.background; delete keep.view;
    const room = figure.clientWidth, draw = (c) => window.vegaEmbed(drawn, { ...c, config: keep }, { renderer: "svg", actions: false, logLevel: 1, config: config(dark, narrow), tooltip: { theme: dark ? "dark" : "light" } });
    await draw(chart);
    const size = () => drawn.querySelector("svg").viewBox.baseVal.width;
    if (room && size() > room && hasAxes(chart) && across(chart)) await draw(narrowed(chart, Math.max(0.5, 1 - (size() - room) / across(chart))));
    const svg = drawn.querySelector("svg");
    if (room) settled(svg, room, 0.85);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", spec.description || "Chart");
    drawn.className = "drawn";
    figure.querySelector(".drawn").replaceWith(drawn);
    figure.classList.add("shown");
    for (const i of drawn.querySelectorAll(".vega-bind input")) i.setAttribute("aria-label", i.closest(".vega-bind").textContent.trim());
  };
  const live = [...document.querySelectorAll("figure.chart.live")];
  let look = "", queue = Promise.resolve();
  const redraw = () => {
    const now = `${isDark()} ${isNarrow()}`;
    if (now === look) return;
    look = now;
    refit();
    if (!window.vegaEmbed) return reach();
    for (const f of live) queue = queue.then(() => show(f)).catch((e) => console.error(`chart: ${e.message || e}`));
    queue = queue.then(() => { root.dataset.charts = look; reach(); });
  };

  // a picture without a spec: on a phone its legends move below it
  const pictures = [...document.querySelectorAll("figure.chart:not(.live) svg")].map((svg) => ({ svg, place: svg.parentNode, wide: svg.cloneNode(true) }));
  const refit = () => {
    for (const p of pictures) {
      const fresh = p.wide.cloneNode(true);
      p.svg.replaceWith(fresh); p.svg = fresh;
      if (!p.place.clientWidth) continue; // folded away
      if (isNarrow()) below(fresh);
      settled(fresh, p.place.clientWidth, 0.66);
    }
  };
  const below = (svg) => {
    const root = svg.querySelector("g.root"), frame = root && root.parentNode, box = svg.viewBox.baseVal;
    const beside = root ? [...root.querySelectorAll(".role-legend > g")].filter((g) => g.getBoundingClientRect().left > svg.getBoundingClientRect().left + box.width / 3) : [];
    if (!beside.length) return;
    const left = frame.transform.baseVal.consolidate().matrix, sizes = beside.map((g) => g.getBBox());
    for (const g of beside) g.style.display = "none";
    const rest = frame.getBBox();
    let y = rest.y + rest.height + 14, right = rest.x + rest.width;
    beside.forEach((g, i) => {
      g.style.display = "";
      g.setAttribute("transform", `translate(${Math.max(0, rest.x)},${y - sizes[i].y})`);
      y += sizes[i].height + 10; right = Math.max(right, sizes[i].width);
    });
    const w = Math.ceil(left.e + right + 8), h = Math.ceil(left.f + y);
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`); svg.setAttribute("width", w); svg.setAttribute("height", h);
    const back = svg.querySelector(":scope > rect"); if (back) { back.setAttribute("width", w); back.setAttribute("height", h); }
  };

  // a picture without a spec: the values that Vega wrote beside each mark
  const tip = document.createElement("div");
  tip.className = "tip"; tip.hidden = true;
  document.body.append(tip);
  document.addEventListener("pointermove", (e) => {
    const mark = e.target.closest && e.target.closest("figure.chart:not(.shown) svg [data-label]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.dataset.label.split("; ").filter((p) => !/: null$/.test(p)).map((p) => p.replace(/(\d\.\d{3})\d+/, "$1")).join("\n");
    tip.style.left = Math.min(e.clientX + 14, window.innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = e.clientY + 16 + "px";
  });

  // what scrolls can be reached by keyboard, and shows that there is more
  const more = (e) => { const b = e.target; b.classList.toggle("more", b.scrollLeft + b.clientWidth < b.scrollWidth - 2); };
  const reach = () => {
    for (const b of document.querySelectorAll("pre, .box, .drawn, .katex-display")) more({ target: b });
    for (const b of document.querySelectorAll("pre, .box, .drawn, .katex-display"))
      if (b.scrollWidth > b.clientWidth + 1 && !b.hasAttribute("tabindex")) {
        b.tabIndex = 0;
        b.addEventListener("scroll", more, { passive: true });
        if (b.tagName !== "PRE") { b.setAttribute("role", "group"); b.setAttribute("aria-label", b.classList.contains("box") ? "table" : b.classList.contains("drawn") ? "chart" : "formula"); }
      }
  };
  // the switches of the page: words, and keys
  for (const a of document.querySelectorAll(".quarto-color-scheme-toggle")) { a.setAttribute("aria-label", "Light or dark"); a.setAttribute("role", "button"); }
  document.addEventListener("keydown", (e) => { if ((e.key === "Enter" || e.key === " ") && e.target.matches && e.target.matches("a[role=button]:not([href])")) { e.preventDefault(); e.target.click(); } });

  new MutationObserver(redraw).observe(root, { attributes: true, attributeFilter: ["data-scheme", "class"] });
  new MutationObserver(redraw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  window.addEventListener("resize", redraw);
  window.addEventListener("load", () => { redraw(); reach(); });
})();
