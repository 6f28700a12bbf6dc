// Every setting of every run, and where they differ.

function settingColumns() {
  return shownRuns().flatMap((run) => [
    ...Object.entries(run.earlier).map(([file, settings]) => [`${run.name} until ${file.replace(/^config\.until-(step-\d+)\.yaml$/, "$1")}`, settings]),
    [run.name, run.settings]]);
}

function drawSettingRows(box, columns) {
  const words = (document.getElementById("filter")?.value || "").toLowerCase();
  const keys = [...new Set(columns.flatMap(([, settings]) => Object.keys(settings)))];
  const valuesOf = (key) => columns.map(([, settings]) => settings[key] ?? "(absent)");
  const differs = (key) => new Set(valuesOf(key)).size > 1;
  const shown = keys.filter((key) => (choices.differ !== "1" || differs(key)) && `${key} ${valuesOf(key).join(" ")}`.toLowerCase().includes(words));
  const rows = shown.map((key) => ({cells: [key, ...valuesOf(key)], attributes: differs(key) && choices.differ !== "1" ? {class: "changed"} : {}}));
  box.replaceChildren(el("p", {class: "quiet"}, `${shown.length} of ${keys.length} settings, ${keys.filter(differs).length} differ`),
    table(["setting", ...columns.map(([name]) => name)], rows, ["key", ...columns.map(() => "value")]));
}

views.push({
  key: "settings", title: "Settings",
  draw(main) {
    for (const run of runs) missingNotices(main, "config.yaml", run);
    const columns = settingColumns();
    if (choices.differ === undefined) choose({differ: columns.length > 1 ? "1" : "0"});
    const box = el("div", {});
    const redraw = () => drawSettingRows(box, columns);
    main.append(el("div", {class: "bar"},
      el("input", {type: "search", id: "filter", placeholder: "filter settings  (/)", "aria-label": "filter settings", oninput: redraw}),
      el("label", {}, el("input", {type: "checkbox", checked: choices.differ === "1", onchange: (event) => { choose({differ: event.target.checked ? "1" : "0"}); redraw(); }}), "only those that differ")), box);
    redraw();
  },
});
