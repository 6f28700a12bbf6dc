// Why a run failed: the cause, the script's line, the others, and the stacks of the ranks.

function failureBlock(file, failure) {
  const call = [failure.role, failure.method].filter(Boolean).join(".");
  const facts = [["rank", failure.rank], ["call", call && `${call} (call ${failure.call}, ${failure.lane} lane)`], ["kind", failure.kind],
    ["called at", failure.line], ["its Python was at", failure.where], ["time", failure.time]];
  const shown = facts.filter(([, value]) => value !== undefined && value !== null && value !== "");
  const others = failure.others || [];
  return el("section", {class: "card group"},
    el("h3", {}, file), el("pre", {class: "notice bad"}, `rank ${failure.rank}: ${failure.cause}`),
    table(["fact", "value"], shown.map(([name, value]) => [name, String(value)]), ["", "key"]),
    failure.own_traceback ? [el("h2", {}, "In your code"), el("pre", {}, failure.own_traceback)] : null,
    failure.traceback ? el("details", {open: !failure.own_traceback && !failure.cause.includes("Traceback")}, el("summary", {}, "whole traceback"), el("pre", {}, failure.traceback)) : null,
    others.length ? [el("h2", {}, "Other ranks"), table(["rank", "cause"], others.map((other) => [String(other.rank), other.cause]), ["number", "key"])] : null);
}

const hasFailed = (run) => Object.keys(run.failures).length || Object.keys(run.stacks).length;
if (runs.some(hasFailed)) views.push({
  key: "failures", title: "Failures",
  draw(main) {
    for (const run of shownRuns()) {
      const [failures, stacks] = [Object.entries(run.failures), Object.entries(run.stacks)];
      if (runs.length > 1) main.append(el("h2", {}, run.name));
      if (!failures.length) main.append(el("p", {class: "quiet"}, "No rank has reported a failure."));
      main.append(...failures.map(([file, failure]) => failureBlock(file, failure)));
      if (stacks.length) main.append(el("h2", {}, "Stacks"));
      main.append(...stacks.map(([file, text], place) => el("details", {open: place === 0}, el("summary", {}, file), el("pre", {}, text))));
    }
  },
});
