// Predicted and measured: seconds by stage, row bytes by edge, weights by step.

function stageTraces(stages) {
  const bars = (name, color) => ({type: "bar", orientation: "h", name, y: stages.map(({stage}) => plain(stage)), x: stages.map((stage) => stage[name]),
    marker: {color}, customdata: stages.map((stage) => secondsText(stage[name])), hovertemplate: `${name} %{customdata}<extra></extra>`});
  return [bars("predicted", COLOURS[7]), bars("measured", COLOURS[0])];
}

function drawComparison(main, run) {
  const found = run.prediction;
  if (runs.length > 1) main.append(el("h2", {}, run.name));
  missingNotices(main, "prediction.json", run);
  const stages = found.stages || [];
  if (!stages.length) return null;
  const area = el("div", {});
  area.style.height = `${70 + 34 * stages.length}px`;
  main.append(el("section", {class: "plot wide"}, el("h3", {}, `Seconds of a step, predicted for ${found.hardware || "no hardware"} and measured (median)`), area));
  const ratio = ({predicted, measured}) => (predicted && measured ? short(predicted / measured, 2) : "–");
  main.append(el("h2", {}, "Stages"), table(["stage", "predicted", "measured", "predicted / measured"],
    stages.map((stage) => [stage.stage, secondsText(stage.predicted), secondsText(stage.measured), ratio(stage)]), ["key", "number", "number", "number"]));
  const edges = [...(found.edges || [])].sort((a, b) => b[3] - a[3]);
  if (edges.length) main.append(
    el("h2", {}, "Row bytes by edge"),
    el("p", {class: found.bytes_agree ? "good" : "bad"}, `steps ${(found.steps || []).join(", ")}: ${found.bytes_agree ? "equal on every edge" : "some edges differ from the plan"}`),
    table(["edge", "planned", "counted"], edges.map(([from, to, planned, counted]) => ({
      cells: [`${from} → ${to}`, bytesText(planned), bytesText(counted)], attributes: planned === counted ? {} : {class: "changed"}})), ["key", "number", "number"]));
  const syncs = found.weight_syncs || [];
  if (syncs.length) main.append(el("h2", {}, "Weights from trainer to generator"), table(["step", "syncs", "planned", "counted"], syncs.map((sync) => ({
    cells: [String(sync.step), String(sync.syncs), bytesText(sync.planned), bytesText(sync.counted)], attributes: sync.planned === sync.counted ? {} : {class: "changed"}})), ["number", "number", "number", "number"]));
  for (const note of found.notes || []) main.append(notice(note));
  return () => plot(area, stageTraces(stages), {...LEGEND, barmode: "group", margin: {l: 150, r: 8, t: 6, b: 64},
    yaxis: {autorange: "reversed"}, xaxis: {ticksuffix: " s"}});
}

views.push({
  key: "prediction", title: "Predicted / measured",
  draw(main) {
    const plots = shownRuns().map((run) => drawComparison(main, run));
    return () => plots.forEach((draw) => draw?.());
  },
});
