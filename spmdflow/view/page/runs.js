// The table of runs: their state, the settings that differ and their last metrics.

const TABLE_METRICS = ["eval/accuracy", "eval/mean", "eval/loss", "reward/mean", "actor/reference_kl", "actor/loss", "actor/entropy", "rollout/response_length"];
const MOST_TABLE_METRICS = 4;
const OWN_NAMES = new Set(["run.dir", "run.name"]);  // they differ between all runs

function lastValue(run, name) {
  const values = (run.metrics[name] || []).filter((value) => value !== null);
  return values.length ? values[values.length - 1] : null;
}

function differingSettings() {
  const known = runs.filter((run) => Object.keys(run.settings).length);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.settings)))];
  return keys.filter((key) => !OWN_NAMES.has(key) && new Set(known.map((run) => run.settings[key])).size > 1);
}

function runsTable() {
  const keys = differingSettings();
  const names = TABLE_METRICS.filter((name) => runs.some((run) => lastValue(run, name) !== null)).slice(0, MOST_TABLE_METRICS);
  const shortKey = (key) => el("span", {title: key}, key.split(".").slice(-1)[0]);
  const rows = runs.map((run) => [
    el("span", {class: "run-name", style: `--run:${run.colour}`}, el("i", {}), run.name), run.state, String(run.steps[run.steps.length - 1] ?? 0),
    ...keys.map((key) => run.settings[key] ?? "–"), ...names.map((name) => short(lastValue(run, name)))]);
  return el("section", {class: "runs-table", "aria-label": "runs"},
    table(["run", "state", "steps", ...keys.map(shortKey), ...names], rows, ["key", "", "number", ...keys.map(() => "key"), ...names.map(() => "number")]));
}
