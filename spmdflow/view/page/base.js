// What all views share: the content, the choices (kept in the address), elements, keys.

const content = JSON.parse(document.getElementById("summary").textContent);
const runs = content.runs;
const dark = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = ["#3f85dd", "#d9792b", "#2f9667", "#a04fb5", "#c2423c", "#7a6a4f", "#3aa3b5", "#8a8f98"];
const views = [];  // {key, title, draw(main), onKey(key)}; each file adds its own

runs.forEach((run, number) => { run.number = number; run.colour = COLOURS[number % COLOURS.length]; });

// el("div", {class: "x", onclick: f}, child, "text"): children are nodes or text, never markup.
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}
const drawn = (tag, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value === "boolean") made[name] = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

// Choices: what is shown, in the address after "#", so that a reload or a link shows the same.
const choices = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
function choose(changes) {
  Object.assign(choices, changes);
  for (const name of Object.keys(choices)) if (choices[name] === null) delete choices[name];
  history.replaceState(null, "", "#" + new URLSearchParams(choices));
}
const chosenSet = (name) => new Set((choices[name] || "").split("\n").filter(Boolean));
const shownRuns = () => { const hidden = chosenSet("hidden"); return runs.filter((run) => !hidden.has(String(run.number))); };

// A part of the page: compressed JSON, read once.
const parts = new Map();
function part(name) {
  if (!parts.has(name)) parts.set(name, readPart(name));
  return parts.get(name);
}
async function readPart(name) {
  const letters = atob(document.getElementById(name).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);  // ten times as fast as from()
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}
const stepsOf = (index) => Object.keys(index).map(Number).sort((a, b) => a - b);

let plotly = null;  // a promise: its script runs when the first plot is drawn
function loadPlotly() {
  plotly = plotly || part("plotly").then((text) => { document.head.append(el("script", {}, text)); });
  return plotly;
}

// Numbers
const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;
function short(x, digits = 4) {
  if (x === null || x === undefined) return "–";
  if (typeof x !== "number") return String(x);
  return Math.abs(x) >= 1e5 || (x !== 0 && Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(digits));
}
function bytesText(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (size >= 1000 && power < 4) { size /= 1000; power += 1; }
  return `${+size.toPrecision(3)} ${units[power]}`;
}
function secondsText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1e-3) return `${+(seconds * 1e6).toPrecision(3)} µs`;
  return seconds < 1 ? `${+(seconds * 1e3).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`;
}

// Parts of views
const notice = (text, bad = false) => el("p", {class: bad ? "notice bad" : "notice"}, text);
function chooser(label, values, chosen, onchange) {
  const options = values.map(([value, text]) => el("option", {value, selected: String(value) === String(chosen)}, text));
  return el("label", {}, label, el("select", {onchange: (event) => onchange(event.target.value)}, options));
}
function choiceButtons(label, values, chosen, onchoose) {
  return el("span", {class: "choice", role: "group", "aria-label": label}, values.map(([value, text]) =>
    el("button", {"aria-pressed": String(value === chosen), onclick: () => onchoose(value)}, text)));
}
function stepper(label, values, chosen, onchoose) {
  const place = values.indexOf(chosen);
  const go = (to) => { if (to >= 0 && to < values.length) onchoose(values[to]); };
  return el("span", {class: "bar", style: "margin:0"},
    el("button", {"aria-label": `previous ${label}`, disabled: place <= 0, onclick: () => go(place - 1)}, "‹"),
    chooser(label, values.map((value) => [value, value]), chosen, (value) => onchoose(Number(value))),
    el("input", {type: "range", min: 0, max: values.length - 1, value: place, "aria-label": `${label} of ${values.length}`,
      onchange: (event) => go(Number(event.target.value))}),
    el("button", {"aria-label": `next ${label}`, disabled: place >= values.length - 1, onclick: () => go(place + 1)}, "›"));
}
function table(head, rows, classes = []) {
  const cell = (tag, value, column) => el(tag, {class: classes[column] || null}, value);
  return el("div", {class: "wide-table"}, el("table", {},
    el("thead", {}, el("tr", {}, head.map((value, column) => cell("th", value, column)))),
    el("tbody", {}, rows.map((row) => el("tr", row.attributes || {}, (row.cells || row).map((value, column) => cell("td", value, column)))))));
}
function missingNotices(main, file, run) {
  if (run.missing.includes(file)) main.append(notice(`${run.name}: ${file} is not there, or has nothing that can be read`));
  for (const note of run.notes) if (note.startsWith(file)) main.append(notice(`${run.name}: ${note}`));
}
function runChooser(onchoose) {
  if (runs.length < 2) return null;
  return chooser("run", runs.map((run) => [run.number, run.name]), chosenRun().number, (value) => { choose({run: value}); onchoose(); });
}
const chosenRun = () => runs[Number(choices.run) || 0] || runs[0];

const LEGEND = {showlegend: true, legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom"}};

// Plots; names are escaped, as plotly reads tags in texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;");
async function plot(area, traces, layout = {}) {
  await loadPlotly();
  if (!area.isConnected) return;
  if (!area.classList.contains("js-plotly-plot")) area.replaceChildren();
  const css = getComputedStyle(document.documentElement);
  const [ink, line] = [css.getPropertyValue("--quiet").trim(), css.getPropertyValue("--line").trim()];
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: "e"};
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: {color: ink, size: 11}, modebar: {bgcolor: "rgba(0,0,0,0)", color: line, activecolor: ink}, margin: {l: 48, r: 8, t: 6, b: 30}, ...layout,
    xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
  };
  Plotly.react(area, traces, base, {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
}

// A curve is drawn here until the pointer comes to it: plotly's script alone takes four fifths of the time that opening a page of curves would.
function curve(area, traces, layout) {
  if (plotly) { plot(area, traces, layout); return; }
  area.replaceChildren(sketch(area, traces, layout.yaxis.type === "log"));
  area.addEventListener("pointerenter", () => plot(area, traces, layout), {once: true});
}
function sketch(area, traces, isLog) {
  const [left, right, top, bottom] = [52, area.clientWidth - 8, 6, area.clientHeight - 30];
  const scale = isLog ? Math.log10 : (y) => y;
  const points = traces.map((trace) => trace.x.map((x, i) => [x, scale(trace.y[i])]).filter(([, y]) => Number.isFinite(y)));
  const [[least, x1], [y0, y1]] = [0, 0.05].map((room, axis) => ends(points.flat().map((point) => point[axis]), room));
  const x0 = Math.max(0, least);  // steps, tokens and hours begin at 0
  const [across, up] = [(x) => left + (right - left) * (x - x0) / (x1 - x0), (y) => bottom - (bottom - top) * (y - y0) / (y1 - y0)];
  const text = (x, y, anchor, value) => drawn("text", {x, y, "text-anchor": anchor}, value);
  return drawn("svg", {class: "sketch", width: "100%", height: "100%"},
    ticks(y0, y1).map((y) => [drawn("path", {d: `M${left},${up(y)}H${right}`}), text(left - 5, up(y) + 4, "end", short(isLog ? 10 ** y : y, 3))]),
    ticks(x0, x1).map((x) => [drawn("path", {d: `M${across(x)},${top}V${bottom}`}), text(across(x), bottom + 16, "middle", short(x))]),
    traces.map((trace, place) => {
      const [at, {color, width}] = [points[place].map(([x, y]) => [across(x).toFixed(1), up(y).toFixed(1)]), trace.line];
      const line = drawn("path", {class: "curve", d: at.length ? `M${at.join("L")}` : "", stroke: color, "stroke-width": width, opacity: trace.opacity});
      return trace.mode.includes("markers") ? [line, at.map(([cx, cy]) => drawn("circle", {cx, cy, r: 2, fill: color}))] : line;
    }));
}
// [low, high] with a share of their distance above and below; values may be none.
function ends(values, share) {
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
  const room = high > low ? share * (high - low) : 0.1 * Math.abs(low) || 1;
  return [low - room, high + room];
}
function ticks(low, high) {
  const rough = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step) - first + 1}, (_, i) => +((first + i) * step).toPrecision(12));
}
