// The table of runs: their state, the settings that differ and their last metrics.

function lastValue(run, name) {
  const values = (run.metrics[name] || []).filter((value) => value !== null);
  return values.length ? values[values.length - 1] : null;
}

function runsTable() {
  const {settings: keys, metrics: names} = content.table;  // chosen by spmdflow/tracking/summary_table.py
  const shortKey = (key) => el("span", {title: key}, key.split(".").slice(-1)[0]);
  const rows = runs.map((run) => [
    el("span", {class: "run-name", style: `--run:${run.colour}`}, el("i", {}), run.name), run.state, String(run.steps[run.steps.length - 1] ?? 0),
    ...keys.map((key) => run.settings[key] ?? "–"), ...names.map((name) => short(lastValue(run, name)))]);
  return el("section", {class: "runs-table", "aria-label": "runs"},
    table(["run", "state", "steps", ...keys.map(shortKey), ...names], rows, ["key", "", "number", ...keys.map(() => "key"), ...names.map(() => "number")]));
}
