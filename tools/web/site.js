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
    return out;
  };
  // black ink is light on a dark page
  const inked = (spec) => JSON.parse(JSON.stringify(spec).replace(/"(?:black|#000000)"/g, '"#f0f0f0"').replace(/"#444444"/g, '"#b9c0c8"'));
  const config = (dark, narrow) => {
    const ink = dark ? "#d9dde2" : "#1b1f23", soft = dark ? "#3a4149" : "#d5d9dd";
    return {
      background: "transparent", tooltipFormat: { numberFormat: ".4~r" }, mark: { tooltip: { content: "encoding" } }, font: "system-ui, sans-serif", view: { stroke: soft },
      axis: { labelColor: ink, titleColor: ink, gridColor: soft, domainColor: soft, tickColor: soft },
      legend: { labelColor: ink, titleColor: ink, columns: narrow ? 2 : undefined },
      header: { labelColor: ink, titleColor: ink }, title: { color: ink, subtitleColor: ink, fontSize: 13 },
      text: { color: ink }, rule: { color: ink },
    };
  };
  const words = (text, n) => text.split(" ").reduce((lines, w) => { (lines[lines.length - 1] + " " + w).length > n ? lines.push(w) : (lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + w); return lines; }, [""]);
  const folded = (t) => typeof t === "string" ? words(t, 44) : Array.isArray(t) ? t.flatMap((x) => words(x, 52)) : t;

  const show = async (figure) => {
    const spec = JSON.parse(figure.querySelector("script.spec").textContent), dark = isDark(), narrow = isNarrow();
    const own = spec.config || {};
    let chart = narrow ? stacked(spec) : spec;
    if (dark) chart = inked(chart);
    if (narrow && chart.title) chart = { ...chart, title: typeof chart.title === "object" && !Array.isArray(chart.title) ? { ...chart.title, text: folded(chart.title.text), subtitle: folded(chart.title.subtitle) } : folded(chart.title) };
    const drawn = document.createElement("div");
    const keep = { ...own }; delete keep.background; delete keep.view;
    await window.vegaEmbed(drawn, { ...chart, config: keep }, { renderer: "svg", actions: false, logLevel: 1, config: config(dark, narrow), tooltip: { theme: dark ? "dark" : "light" } });
    const svg = drawn.querySelector("svg");
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
    if (now === look || !window.vegaEmbed) return;
    look = now;
    for (const f of live) queue = queue.then(() => show(f)).catch((e) => console.error(`chart: ${e.message || e}`));
    queue = queue.then(() => { root.dataset.charts = look; reach(); });
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

  // what scrolls can be reached by keyboard
  const reach = () => {
    for (const b of document.querySelectorAll("pre, .box, .drawn, .katex-display"))
      if (b.scrollWidth > b.clientWidth + 1 && !b.hasAttribute("tabindex")) {
        b.tabIndex = 0;
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
