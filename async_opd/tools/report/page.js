"use strict";
// Draws every chart of the page in the page's colours, and again when the colour scheme changes.
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const narrow = matchMedia("(max-width: 760px)");
const views = [];

function theme() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  const [ink, soft, rule] = [of("--ink"), of("--soft"), of("--rule")];
  const colours = [1, 2, 3, 4, 5, 6, 7, 8].map((index) => of(`--c${index}`));
  const font = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif";
  return {
    background: null, font, range: { category: colours },
    view: { stroke: null, continuousHeight: 210, discreteHeight: 210 },
    mark: { color: colours[0], tooltip: true },
    line: { strokeWidth: 2 }, point: { size: 36, filled: true },
    axis: {
      labelColor: soft, titleColor: soft, gridColor: rule, domainColor: rule, tickColor: rule,
      labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: narrow.matches ? 130 : 190,
    },
    text: { color: ink, fontSize: 12 },
    axisX: { grid: false }, axisQuantitative: { tickCount: 5 },
    legend: {
      labelColor: ink, titleColor: soft, labelFontSize: 12, orient: "top", symbolType: "square",
      labelLimit: narrow.matches ? 130 : 220, columns: narrow.matches ? 2 : 3,
    },
  };
}

async function draw() {
  while (views.length) views.pop().finalize();
  const config = theme();
  for (const [key, spec] of Object.entries(charts)) {
    const place = document.getElementById(`chart-${key}`);
    const full = {
      width: "container", height: 210, ...spec, config,
      autosize: { type: "fit-x", contains: "padding" }, description: place.dataset.title,
    };
    // ast: expressions are interpreted, so that the page needs no eval.
    const drawn = await vegaEmbed(place, full, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
    });
    views.push(drawn.view);
  }
  document.documentElement.dataset.drawn = "yes";
}

let drawing = draw();
for (const media of [dark, narrow]) {
  media.addEventListener("change", () => {
    delete document.documentElement.dataset.drawn;
    drawing = drawing.then(draw);
  });
}

// Recorded tokens: a panel shows the token under the pointer or with the focus; arrows move it.
const recorded = JSON.parse(document.getElementById("token-data")?.textContent ?? "[]");

function tableOf(columns, rows) {
  const table = document.createElement("table");
  for (const [cells, kind] of [[columns, "th"], ...rows.map((row) => [row, "td"])]) {
    const line = table.insertRow();
    for (const cell of cells) {
      line.appendChild(document.createElement(kind)).textContent = cell;
    }
  }
  return table;
}

function showToken(token) {
  const sample = token.closest(".sample");
  const tokens = [...sample.querySelectorAll(".tok")];
  const found = recorded[sample.dataset.sample][tokens.indexOf(token)];
  for (const one of tokens) {
    one.classList.toggle("chosen", one === token);
    one.tabIndex = one === token ? 0 : -1;
  }
  const half = Math.ceil(found.facts.length / 2);
  const tables = [
    tableOf(["", ""], found.facts.slice(0, half)), tableOf(["", ""], found.facts.slice(half)),
    tableOf(["student's", "q"], found.student.map(([name, , q]) => [name, q])),
  ];
  if (found.support.length) tables.push(tableOf(["teacher or support", "p", "q"], found.support));
  sample.querySelector(".panel").replaceChildren(...tables);
}

for (const sample of document.querySelectorAll(".sample")) {
  const first = sample.querySelector(".tok");
  if (first) showToken(first);
  for (const kind of ["pointerover", "focusin"]) {
    sample.addEventListener(kind, (event) => {
      if (event.target.classList.contains("tok")) showToken(event.target);
    });
  }
  sample.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const tokens = [...sample.querySelectorAll(".tok")];
    const at = tokens.indexOf(event.target);
    const next = step && at >= 0 && tokens[at + step];
    if (next) { event.preventDefault(); next.focus(); }
  });
}
