// A step: what every rank did when, by lane, with bytes; its calls as a table; memory by call.

// "transfer 12 of actor.update_actor" -> "transfer of actor.update_actor"
const callOf = (label) => label.replace(/^transfer \d+ of /, "transfer of ");
const methodOf = (label) => label.split(".").slice(1).join(".") || label;

function lanes(spans) {
  const order = new Map();
  for (const [rank, lane] of spans) order.set(`rank ${rank} ${lane}`, [rank, lane]);
  return [...order].sort(([, a], [, b]) => a[0] - b[0] || (a[1] < b[1] ? -1 : 1)).map(([name]) => name);
}

function barTraces(spans) {
  const whole = Math.max(...spans.map((span) => span[4]));
  const isWide = (span) => span[4] - span[3] > 0.07 * whole;  // room for its name
  const byCall = new Map();
  for (const span of spans) {
    const name = span[1] === "transfer" ? "transfers" : callOf(span[2]);
    byCall.set(name, [...(byCall.get(name) || []), span]);
  }
  let colour = -1;
  return [...byCall].map(([name, found]) => {
    if (name !== "transfers") colour += 1;
    return {
      type: "bar", orientation: "h", name: plain(name), textposition: "inside", insidetextanchor: "start", constraintext: "none", textangle: 0,
      base: found.map((span) => span[3]), x: found.map((span) => span[4] - span[3]), y: found.map(([rank, lane]) => `rank ${rank} ${lane}`),
      text: name === "transfers" ? null : found.map((span) => (isWide(span) ? plain(methodOf(span[2])) : "")),
      marker: {color: name === "transfers" ? "#8a8f98" : COLOURS[colour % (COLOURS.length - 1)], line: {width: 0.5, color: "rgba(128,128,128,.6)"}},
      customdata: found.map((span) => `${plain(span[2])}<br>${secondsText(span[4] - span[3])} from ${secondsText(span[3])}`
        + (span[5] ? `<br>${bytesText(span[5])} received` : "") + (span[6] ? `<br>memory afterwards ${bytesText(span[6])}` : "")),
      hovertemplate: "%{customdata}<extra>%{y}</extra>",
    };
  });
}

function callTable(spans) {
  const calls = new Map();
  for (const [rank, lane, label, start, end, bytes] of spans) {
    const call = calls.get(callOf(label)) || {ranks: new Set(), first: start, longest: 0, total: 0, bytes: 0, times: 0};
    call.ranks.add(rank);
    call.first = Math.min(call.first, start);
    call.longest = Math.max(call.longest, end - start);
    call.total += end - start;
    call.bytes += bytes;
    call.times += 1;
    calls.set(callOf(label), call);
  }
  const rows = [...calls].sort(([, a], [, b]) => a.first - b.first).map(([name, call]) =>
    [name, String(call.ranks.size), String(call.times), secondsText(call.first), secondsText(call.longest), secondsText(call.total), call.bytes ? bytesText(call.bytes) : "–"]);
  return table(["call", "ranks", "pieces", "first begins", "longest", "all ranks", "bytes received"], rows, ["key", ...Array(6).fill("number")]);
}

function memoryTraces(spans) {
  const ranks = [...new Set(spans.filter((span) => span[6]).map(([rank]) => rank))].sort((a, b) => a - b);
  return ranks.map((rank) => {
    const own = spans.filter((span) => span[0] === rank && span[6]).sort((a, b) => a[4] - b[4]);
    return {x: own.map((span) => span[4]), y: own.map((span) => span[6]), name: `rank ${rank}`, mode: "lines+markers", line: {shape: "hv", width: 1.5, color: COLOURS[rank % COLOURS.length]},
      marker: {size: 4}, customdata: own.map((span) => plain(span[2])), hovertemplate: "%{y:.4s}B after %{customdata}<extra>%{fullData.name}</extra>"};
  });
}

async function drawTimeline(main) {
  const run = chosenRun();
  const again = () => showView("timeline");
  missingNotices(main, "trace.json", run);
  const steps = stepsOf(run.spans);
  const chosen = steps.includes(Number(choices.step)) ? Number(choices.step) : steps[steps.length - 1];
  const bar = el("div", {class: "bar"}, runChooser(again));
  main.append(bar);
  if (!steps.length) return;
  const spans = (await part(run.spans[chosen]))[chosen];
  bar.append(stepper("step", steps, chosen, (step) => { choose({step}); again(); }),
    el("span", {class: "quiet"}, `${secondsText(Math.max(...spans.map((span) => span[4])))}, ${bytesText(spans.reduce((sum, span) => sum + span[5], 0))} of rows between ranks`));
  const [rows, range] = [lanes(spans), [0, 1.02 * Math.max(...spans.map((span) => span[4]))]];
  const [area, memory] = [el("div", {}), el("div", {class: "area"})];
  area.style.height = `${96 + 26 * rows.length}px`;
  main.append(el("section", {class: "plot wide", "aria-label": "timeline"}, el("h3", {}, "Ranks and lanes, seconds since the step's first call"), area));
  const traces = memoryTraces(spans);
  if (traces.length) main.append(el("h2", {}, "Memory"), el("section", {class: "plot wide memory", "aria-label": "memory"}, el("h3", {}, "Each rank's process after its calls, bytes of host memory"), memory));
  main.append(el("h2", {}, "Calls and transfers"), callTable(spans));
  if (!traces.length) main.append(notice("Memory by call is not in this trace: it is of an earlier version. perf/host_bytes is in the metrics."));
  return () => {
    plot(area, barTraces(spans), {...LEGEND, barmode: "overlay", bargap: 0.25, margin: {l: 110, r: 8, t: 6, b: 64},
      yaxis: {categoryorder: "array", categoryarray: rows, autorange: "reversed"}, xaxis: {ticksuffix: " s", range}});
    if (traces.length) plot(memory, traces, {...LEGEND, margin: {l: 110, r: 8, t: 6, b: 64}, yaxis: {tickformat: ".3s", ticksuffix: "B", rangemode: "tozero"}, xaxis: {ticksuffix: " s", range}});
  };
}

views.push({key: "timeline", title: "Timeline", draw: drawTimeline, steps: (run) => stepsOf(run.spans)});
