// Samples of a step, groups one below the other, the samples of a group side by side.

const GROUPS_PER_PAGE = 8;
const MOST_TOKENS = 3000;
const TOKEN_COLOURS = {
  log_prob: {label: "log-prob", low: "likely", high: "unlikely", share: (sample, i) => Math.min(1, -(sample.log_probs?.[i] ?? 0) / 5), hue: 28, field: "log_probs"},
  gap: {label: "rollout/trainer gap", low: "0", high: "0.1 nats", share: (sample, i) => Math.min(1, Math.abs(sample.gap?.[i] ?? 0) / 0.1), hue: 0, field: "gap"},
  mask: {label: "mask", low: "learnt", high: "not learnt", share: (sample, i) => (sample.mask?.[i] === "0" ? 0.7 : 0), hue: 215, field: null},
};
const shade = (share, hue) => (share > 0.02 ? `hsl(${hue} 85% ${dark.matches ? 45 : 55}% / ${(0.8 * share).toFixed(2)})` : "");

function tokenTitle(sample, i) {
  const log = sample.log_probs?.[i];
  const facts = [`token ${i + 1}`];
  if (log !== undefined && log !== null) facts.push(`log-prob ${log} (${(100 * Math.exp(log)).toPrecision(3)} %)`);
  if (sample.gap) facts.push(`trainer less rollout ${sample.gap[i]}`);
  if (sample.mask) facts.push(sample.mask[i] === "1" ? "learnt" : "not learnt: the environment's");
  return facts.join(", ");
}

// [{own, first, last, text}]: neighbouring tokens that the policy chose, or did not.
function turnsOf(sample) {
  const lengths = sample.lengths || [sample.response.length];
  const letters = sample.lengths ? [...sample.response] : null;  // Python counts code points
  const turns = [];
  let at = 0;
  lengths.forEach((length, i) => {
    const own = !sample.mask || sample.mask[i] === "1";
    const end = i === lengths.length - 1 ? letters?.length : at + length;
    const text = letters ? letters.slice(at, end).join("") : sample.response;
    at += length;
    if (!turns.length || turns[turns.length - 1].own !== own) turns.push({own, tokens: []});
    turns[turns.length - 1].tokens.push([i, text]);
  });
  return turns.map((turn) => ({...turn, text: turn.tokens.map(([, text]) => text).join("")}));
}

function tokenSpans(sample, turn, colour) {
  if (!sample.lengths) return [turn.text];
  const shown = turn.tokens.slice(0, MOST_TOKENS);
  const spans = shown.map(([i, text]) => {
    const style = colour ? shade(colour.share(sample, i), colour.hue) : "";
    return el("span", {class: text ? "token" : "token empty", "data-i": i, style: style ? `background:${style}` : null}, text);
  });
  if (turn.tokens.length > shown.length) spans.push(el("span", {}, turn.tokens.slice(MOST_TOKENS).map(([, text]) => text).join("")));
  return spans;
}

function sampleText(sample, colour) {
  const turns = turnsOf(sample);
  const onmouseover = (event) => { const i = event.target.dataset?.i; if (i !== undefined) event.target.title = tokenTitle(sample, Number(i)); };
  if (turns.length === 1 && turns[0].own && !sample.calls) return el("pre", {class: "text", onmouseover}, tokenSpans(sample, turns[0], colour));
  let reply = 0;
  return el("div", {onmouseover}, turns.map((turn) => {
    const calls = turn.own ? (sample.calls?.[reply] || []).map(([name, given]) => `${name}(${given})`) : [];
    if (turn.own) reply += 1;
    return el("div", {class: turn.own ? "turn own" : "turn"},
      el("small", {}, turn.own ? `reply ${reply}` : "environment", calls.length ? `: calls ${calls.join(", ")}` : ""),
      el("pre", {class: "text"}, tokenSpans(sample, turn, colour)));
  }));
}

function sampleCard(sample, colour) {
  const own = (sample.log_probs || []).filter((value, i) => value !== null && sample.mask?.[i] !== "0");
  const mean = own.length ? own.reduce((a, b) => a + b, 0) / own.length : null;
  const advantage = sample.advantage;
  const facts = [
    el("b", {class: sample.score === null ? "bad" : ""}, short(sample.score)),
    advantage === undefined ? null : el("span", {}, "advantage ", el("span", {class: advantage < 0 ? "bad" : advantage > 0 ? "good" : ""}, (advantage > 0 ? "+" : "") + short(advantage, 3))),
    sample.cost === undefined ? null : el("span", {}, `cost ${short(sample.cost)}`),
    sample.turns === undefined ? null : el("span", {}, count(sample.turns, "turn")),
    sample.lengths ? el("span", {}, count(sample.tokens ?? sample.lengths.length, "token")) : null,
    own.length ? el("span", {}, `mean log-prob ${short(mean, 3)}`) : null,
    sample.gap ? el("span", {}, `largest gap ${short(Math.max(0, ...sample.gap.map(Math.abs)), 3)}`) : null,
  ];
  const terms = Object.entries(sample.terms || {}).map(([name, value]) => el("span", {}, `${name} ${typeof value === "number" ? short(value) : value ?? "–"}`));
  return el("article", {class: "card"}, el("div", {class: "facts"}, facts), terms.length ? el("div", {class: "terms"}, terms) : null, sampleText(sample, colour));
}

const ORDERS = {batch: () => 0, "highest score": (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  "lowest score": (a, b) => (a.score ?? -Infinity) - (b.score ?? -Infinity), longest: (a, b) => (b.tokens ?? b.lengths?.length ?? b.response.length) - (a.tokens ?? a.lengths?.length ?? a.response.length)};

function groupsOf(samples) {
  const groups = new Map();
  samples.forEach((sample, place) => {
    const key = sample.group === undefined ? sample.prompt : `${sample.phase} ${sample.group}`;  // earlier versions told no group
    groups.set(key, [...(groups.get(key) || []), {...sample, place}]);
  });
  return [...groups.values()];
}

function scoresText(group) {
  const scores = group.map((sample) => sample.score).filter((score) => score !== null);
  if (!scores.length) return "no score";
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  return low === high ? `all scores ${short(low)}` : `scores ${short(low)} to ${short(high)}`;
}

function drawGroups(box, groups) {
  const colour = TOKEN_COLOURS[choices.colour || "log_prob"] || null;
  const order = ORDERS[choices.order] || ORDERS.batch;
  const alone = groups.every((group) => group.length === 1);
  const cards = (group) => group.sort(order).map((sample) => sampleCard(sample, colour));
  if (alone) {
    const flat = groups.map((group) => group[0]).sort(order);
    box.replaceChildren(el("div", {class: "cards"}, flat.map((sample) => el("div", {class: "group"}, el("pre", {class: "text"}, sample.prompt), sampleCard(sample, colour)))));
    return;
  }
  box.replaceChildren(...groups.map((group) => el("section", {class: "group"},
    el("div", {class: "facts"}, el("h3", {}, `prompt ${group[0].group ?? ""}`), el("span", {}, count(group.length, "sample")), el("span", {}, scoresText(group))),
    el("pre", {class: "text"}, group[0].prompt), el("div", {class: "cards"}, cards(group)))));
}

// The samples of another run for the same prompts, next to those of this one.
function drawSideBySide(box, groups, run, otherGroups, other, step) {
  const colour = TOKEN_COLOURS[choices.colour || "log_prob"] || null;
  const order = ORDERS[choices.order] || ORDERS.batch;
  const byPrompt = new Map(otherGroups.map((group) => [group[0].prompt, group]));
  const column = (name, group) => el("div", {class: "side"}, el("h3", {}, name),
    group ? group.sort(order).map((sample) => sampleCard(sample, colour)) : el("p", {class: "quiet"}, "has no sample of this prompt"));
  box.replaceChildren(...groups.map((group) => el("section", {class: "group"}, el("pre", {class: "text"}, group[0].prompt),
    el("div", {class: "sides"}, column(run.name, group), column(`${other.name}, step ${step}`, byPrompt.get(group[0].prompt))))));
}

async function otherSamples(step, phase) {
  const other = runs.find((run) => String(run.number) === choices.other);
  if (!other || other === chosenRun()) return null;
  const steps = stepsOf(other.samples);
  if (!steps.length) return null;
  const nearest = steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
  const samples = (await part(other.samples[nearest]))[nearest].filter((sample) => (sample.phase || "all") === phase);
  return {other, step: nearest, groups: groupsOf(samples)};
}

async function drawSamples(main) {
  const run = chosenRun();
  const again = () => showView("samples");
  missingNotices(main, "samples.jsonl", run);
  const steps = stepsOf(run.samples);
  const chosen = steps.includes(Number(choices.step)) ? Number(choices.step) : steps[steps.length - 1];
  const bar = el("div", {class: "bar"}, runChooser(again));
  main.append(bar);
  if (!steps.length) { main.append(el("p", {class: "quiet"}, "No samples: run.sample_every=0 writes none.")); return; }
  const all = (await part(run.samples[chosen]))[chosen];
  const phases = [...new Set(all.map((sample) => sample.phase || "all"))];
  const phase = phases.includes(choices.phase) ? choices.phase : phases[0];
  const words = (choices.words || "").toLowerCase();
  const found = all.filter((sample) => (sample.phase || "all") === phase && (!words || `${sample.prompt} ${sample.response}`.toLowerCase().includes(words)));
  const groups = groupsOf(found);
  const pages = Math.max(1, Math.ceil(groups.length / GROUPS_PER_PAGE));
  const page = Math.min(pages, Number(choices.page) || 1);
  const pick = (changes) => { choose(changes); again(); };
  const names = {train: "training", eval: "held-out", all: "all"};
  bar.append(
    stepper("step", steps, chosen, (step) => pick({step, page: null})),
    phases.length > 1 ? choiceButtons("phase", phases.map((each) => [each, names[each] || each]), phase, (value) => pick({phase: value, page: null})) : "",
    choiceButtons("colour", [...Object.entries(TOKEN_COLOURS).map(([key, {label}]) => [key, label]), ["none", "plain"]], choices.colour || "log_prob", (colour) => pick({colour})),
    runs.length > 1 ? chooser("next to", [["", "no other run"], ...runs.filter((each) => each !== run).map((each) => [each.number, each.name])],
      choices.other || "", (other) => pick({other: other || null})) : "",
    chooser("order", Object.keys(ORDERS).map((name) => [name, name]), choices.order || "batch", (order) => pick({order})),
    el("input", {type: "search", id: "filter", placeholder: "words in this step  (/)", value: choices.words || "", "aria-label": "words in this step", onchange: (event) => pick({words: event.target.value || null, page: null})}));
  if (pages > 1) bar.append(stepper("page", Array.from({length: pages}, (_, place) => place + 1), page, (value) => pick({page: value})));
  const colour = TOKEN_COLOURS[choices.colour || "log_prob"];
  if (colour) bar.append(el("span", {class: "quiet"}, `${colour.low} `, el("span", {class: "scale", style: `background:linear-gradient(90deg,transparent,${shade(1, colour.hue)})`}), ` ${colour.high}`));
  if (colour?.field && found.length && !found.some((sample) => sample[colour.field]))
    main.append(notice(colour.field === "gap" ? "The trainer computed no log-probabilities of these samples to compare (actor.update.old_log_probs=recompute does), or they are of an earlier version." : "These samples have no log-probabilities: they are of an earlier version."));
  const box = el("div", {});
  main.append(box);
  const compared = await otherSamples(chosen, phase);
  if (compared) {
    drawSideBySide(box, groups.slice((page - 1) * GROUPS_PER_PAGE, page * GROUPS_PER_PAGE), run, compared.groups, compared.other, compared.step);
    return;
  }
  if (!groups.length) box.append(el("p", {class: "quiet"}, "No sample of this step has these words."));
  drawGroups(box, groups.slice((page - 1) * GROUPS_PER_PAGE, page * GROUPS_PER_PAGE));
}

views.push({key: "samples", title: "Samples", draw: drawSamples, steps: (run) => stepsOf(run.samples)});
