// The frame: runs, tabs, keys, reloading.

let drawing = 0;

// view.draw(holder) fills the holder and returns what draws its plots, or nothing.
async function showView(key) {
  const view = views.find((each) => each.key === key) || views[0];
  const [number, scroll] = [++drawing, choices.view === view.key ? scrollY : 0];
  choose({view: view.key});
  for (const button of document.querySelectorAll("#tabs button")) {
    const on = button.dataset.key === view.key;
    button.setAttribute("aria-selected", String(on));
    button.tabIndex = on ? 0 : -1;
  }
  const holder = el("div", {});
  const drawPlots = await view.draw(holder);
  if (number !== drawing) return;  // another view was asked for meanwhile
  document.getElementById("view").replaceChildren(holder);
  drawPlots?.();  // plots measure their place, so they come last
  scrollTo(0, scroll);
}

function drawFrame() {
  const hidden = chosenSet("hidden");
  document.getElementById("runs").replaceChildren(...runs.map((run) => el("button",
    {class: "run", style: `--run:${run.colour}`, title: run.path, "aria-pressed": String(!hidden.has(String(run.number))), onclick: () => {
      const now = chosenSet("hidden");
      if (!now.delete(String(run.number))) now.add(String(run.number));
      choose({hidden: [...now].join("\n") || null});
      drawFrame();
      showView(choices.view);
    }}, el("i", {}), el("span", {}, run.name), run.live ? el("span", {class: "good"}, "live") : null,
    Object.keys(run.failures).length ? el("span", {class: "bad"}, "failed") : null)));
}

function start() {
  drawFrame();
  const tabs = document.getElementById("tabs");
  tabs.replaceChildren(...views.map((view, place) => el("button",
    {role: "tab", "data-key": view.key, title: `key ${place + 1}`, onclick: () => showView(view.key)}, view.title)));
  document.getElementById("footer").textContent = `Written ${content.made}. Keys: 1 to ${views.length} views, ← → steps, / filter.`
    + (content.refresh ? ` Follows a live run: loads again every ${content.refresh} s.` : "");
  addEventListener("keydown", onKey);
  dark.addEventListener("change", () => showView(choices.view));
  if (content.refresh) setInterval(() => { if (!document.hidden && !["INPUT", "SELECT"].includes(document.activeElement?.tagName)) location.reload(); }, 1000 * content.refresh);
  showView(choices.view || (runs.length === 1 && Object.keys(runs[0].failures).length ? "failures" : views[0].key));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = views[Number(event.key) - 1];
  const shown = views.find((each) => each.key === choices.view);
  if (view) showView(view.key);
  else if (event.key === "/") { event.preventDefault(); document.getElementById("filter")?.focus(); }
  else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && shown?.steps) {
    const steps = shown.steps(chosenRun());
    const place = steps.includes(Number(choices.step)) ? steps.indexOf(Number(choices.step)) : steps.length - 1;
    const step = steps[place + (event.key === "ArrowLeft" ? -1 : 1)];
    if (step !== undefined) { choose({step, page: null}); showView(shown.key); }
  }
}

start();
