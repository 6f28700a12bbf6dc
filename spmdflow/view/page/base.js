// What all views share: the content, the choices (kept in the address), elements, keys.

const content = JSON.parse(document.getElementById("summary").textContent);
const runs = content.runs;
const dark = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = ["#3f85dd", "#d9792b", "#2f9667", "#a04fb5", "#c2423c", "#7a6a4f", "#3aa3b5", "#8a8f98"];
const views = [];  // {key, title, draw(main), onKey(key)}; each file adds its own

runs.forEach((run, number) => { run.number = number; run.colour = COLOURS[number % COLOURS.length]; });

// el("div", {class: "x", onclick: f}, child, "text"): children are nodes or text, never markup.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value === "boolean") made[name] = value;
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
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
  const css = getComputedStyle(document.documentElement);
  const [ink, line] = [css.getPropertyValue("--quiet").trim(), css.getPropertyValue("--line").trim()];
  const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, exponentformat: "e"};
  const base = {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: {color: ink, size: 11}, margin: {l: 48, r: 8, t: 6, b: 30}, ...layout,
    xaxis: {...axis, ...layout.xaxis}, yaxis: {...axis, ...layout.yaxis},
  };
  Plotly.react(area, traces, base, {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
}
