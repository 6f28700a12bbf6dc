// Generation servers: what ranks last reported about each.

function serverRow(server) {
  const [url, state, version, rows, restarts, recomputed, reason, rank, time] = server;
  const stateText = el("span", {class: state === "ready" ? "good" : state === "dead" || state === "refused" ? "bad" : "quiet"}, state);
  return [url, stateText, String(version), String(rows), String(restarts), String(recomputed), reason || "–", String(rank), new Date(1000 * time).toLocaleString()];
}

if (runs.some((run) => run.servers.length)) views.push({
  key: "servers", title: "Servers",
  draw(main) {
    for (const run of shownRuns()) {
      if (runs.length > 1) main.append(el("h2", {}, run.name));
      for (const note of run.notes) if (note.startsWith("servers")) main.append(notice(`${run.name}: ${note}`));
      if (!run.servers.length) main.append(el("p", {class: "quiet"}, "No rank has reported a generation server."));
      else main.append(table(
        ["server", "state", "weights version", "rows running", "restarts", "recomputed tokens", "reason", "reported by rank", "at"],
        run.servers.map(serverRow), ["key", "", "number", "number", "number", "number", "", "number", ""]));
    }
  },
});
