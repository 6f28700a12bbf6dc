// Curves of all runs over each other, smoothed.

const FIRST_METRICS = ["reward/mean", "eval/accuracy", "eval/mean", "actor/loss", "eval/loss", "actor/approx_kl", "actor/reference_kl",
  "actor/entropy", "actor/clip_fraction", "critic/explained_variance", "rollout/drift", "rollout/response_length",
  "episodes/turns", "perf/tokens_per_second", "time/step_seconds"];

function metricNames() {
  return [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
}
function shownMetrics(names) {
  const first = FIRST_METRICS.filter((name) => names.includes(name));
  if (choices.metrics === undefined) return first;
  const chosen = chosenSet("metrics");
  return [...first, ...names.filter((name) => !first.includes(name))].filter((name) => chosen.has(name));
}

// What the x axis counts; sums over the steps so far.
const X_AXES = {
  step: {label: "steps", values: (run) => run.steps},
  tokens: {label: "tokens", values: (run) => running(run, (place) => sumOf(run, place, ["rollout/prompt_tokens", "rollout/response_tokens"]))},
  hours: {label: "hours", values: (run) => running(run, (place) => sumOf(run, place, ["time/step_seconds"]) / 3600)},
};
const sumOf = (run, place, names) => names.reduce((sum, name) => sum + (run.metrics[name]?.[place] ?? 0), 0);
function running(run, amount) {
  let total = 0;
  return run.steps.map((_, place) => { total += amount(place); return total; });
}

// Exponential moving average, corrected for its start; gaps stay out of it.
function smoothed(values, weight) {
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return Number((sum / total).toPrecision(7));
  });
}

function metricTraces(name, weight, axis) {
  return shownRuns().flatMap((run) => {
    const values = run.metrics[name];
    if (!values) return [];
    const places = X_AXES[axis].values(run);
    const kept = values.map((value, place) => [places[place], value]).filter(([, value]) => value !== null);
    const [x, y] = [kept.map(([step]) => step), kept.map(([, value]) => value)];
    const line = {x, y, type: "scatter", mode: kept.length < 3 ? "markers" : kept.length <= 60 ? "lines+markers" : "lines", name: plain(run.name),
      line: {color: run.colour, width: 1.6}, marker: {color: run.colour, size: 4}, hovertemplate: `${X_AXES[axis].label} %{x:.4g}<br>%{y:.5g}<extra>${plain(run.name)}</extra>`};
    if (!weight) return [line];
    const faint = {...line, mode: "lines", opacity: 0.25, hoverinfo: "skip", hovertemplate: null};
    return [faint, {...line, mode: "lines", y: smoothed(y, weight), line: {...line.line, width: 2}}];
  });
}

function drawPlots(box, names) {
  const weight = Number(choices.smooth || 0);
  const axis = choices.x in X_AXES ? choices.x : "step";
  box.replaceChildren();
  if (!names.length) box.append(el("p", {class: "quiet"}, "No metric is chosen."));
  for (const name of names) {
    const area = el("div", {class: "area"});
    box.append(el("section", {class: "plot", "aria-label": name}, el("h3", {}, name), area));
    curve(area, metricTraces(name, weight, axis), {xaxis: {rangemode: "nonnegative"}, yaxis: {type: choices.log === "1" ? "log" : "linear"}});
  }
}

views.push({
  key: "metrics", title: "Metrics",
  draw(main) {
    for (const run of runs) missingNotices(main, "metrics.jsonl", run);
    const names = metricNames();
    const box = el("div", {class: "plots"});
    const redraw = () => drawPlots(box, shownMetrics(names));
    const toggle = (name, on) => {
      const chosen = new Set(shownMetrics(names));
      if (on) chosen.add(name); else chosen.delete(name);
      choose({metrics: [...chosen].join("\n") || "\n"});
      redraw();
    };
    const list = el("div", {});
    const fill = (filter) => {
      const [chosen, prefixes] = [new Set(shownMetrics(names)), new Map()];
      for (const name of names.filter((each) => each.includes(filter))) {
        const prefix = name.includes("/") ? name.split("/")[0] : "(script)";
        prefixes.set(prefix, [...(prefixes.get(prefix) || []), name]);
      }
      list.replaceChildren(...[...prefixes].map(([prefix, found]) =>
        el("details", {open: Boolean(filter) || found.some((name) => chosen.has(name))}, el("summary", {}, `${prefix} (${found.length})`),
          found.map((name) => el("label", {}, el("input", {type: "checkbox", checked: chosen.has(name), onchange: (event) => toggle(name, event.target.checked)}), name)))));
    };
    const smooth = el("output", {}, choices.smooth || "0");
    if (runs.length > 1) main.append(runsTable());
    const axes = Object.entries(X_AXES).map(([key, {label}]) => [key, label]);
    main.append(
      el("div", {class: "bar"},
        chooser("x axis", axes, choices.x || "step", (x) => { choose({x}); redraw(); }),
        el("label", {}, "smoothing", el("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: choices.smooth || 0, oninput: (event) => {
          choose({smooth: event.target.value}); smooth.textContent = event.target.value; redraw(); }}), smooth),
        el("label", {}, el("input", {type: "checkbox", checked: choices.log === "1", onchange: (event) => { choose({log: event.target.checked ? "1" : null}); redraw(); }}), "logarithmic"),
        el("button", {onclick: () => { choose({metrics: null}); fill(""); redraw(); }}, "first choice"),
        el("span", {class: "quiet"}, "drag: zoom; double click: all")),
      el("div", {class: "split"},
        el("div", {class: "names"}, el("input", {type: "search", id: "filter", placeholder: "filter metrics  (/)", "aria-label": "filter metrics", oninput: (event) => fill(event.target.value)}), list),
        box));
    fill("");
    return redraw;
  },
});
