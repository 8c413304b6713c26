"use strict";
// Texts come from models and tools: they are set as text nodes only, nothing here parses HTML.
const byId = (id) => document.getElementById(id);
function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  return node;
}
const num = (v, digits = 3) => v === null || v === undefined ? "–" : Number(v).toFixed(digits).replace(/^-/, "−");
const signed = (v, digits = 3) => v === null || v === undefined ? "–" : (v > 0 ? "+" : "") + num(v, digits);

async function decode(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const REASONS = {
  credited: "Eq. 6: credit moved towards the steps that the verdicts implicate.",
  unanimous: "Every step has the same weight: the formula gives every step the same total, and draws no distinction (inert).",
  no_criteria: "Fallback: no criterion survived dropout, so there is nothing to move credit by. Every token keeps A.",
  uncited: "Fallback: no pass or fail cites a step. Every token keeps A.",
  single_step: "Fallback: one step only. It keeps A.",
  collapsed: "Fallback: the weights sum to 0 (a winner cited by fails only, or a loser cited by passes only). Every token keeps A.",
  uniform: "The credit rule is uniform: every token keeps A.",
};
const SIGN = { "1": ["✓", "pass", "pass"], "-1": ["✗", "fail", "fail"], "0": ["–", "na", "not applicable"] };

const state = { index: null, at: 0, group: 0, block: null, rollout: 0, step: 0, open: false, tokens: false, turn: 0 };

function fault(error) {
  byId("fault").hidden = false;
  byId("fault").textContent = "This page could not show its data: " + error.message;
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser has no DecompressionStream (it needs Chrome 80, Firefox 113 or Safari 16.4)");
  const index = state.index = await decode("index");
  byId("title").textContent = index.name + " · " + index.setting;
  byId("config-text").textContent = index.config;
  summary(index);
  curves(index.curves);
  const steps = byId("step");
  byId("unit").textContent = index.unit === "batch" ? "Batch" : "Step";
  index.steps.forEach((s, i) => steps.append(el("option", { value: i }, `${s.step + 1}`)));
  if (!index.steps.length) { byId("credit").replaceChildren(el("h2", {}, "Where credit went"), el("p", {}, "No step was archived.")); return; }
  steps.addEventListener("change", () => go(Number(steps.value), 0));
  byId("group").addEventListener("change", () => go(state.at, Number(byId("group").value)));
  byId("step-back").addEventListener("click", () => go(state.at - 1, state.group));
  byId("step-on").addEventListener("click", () => go(state.at + 1, state.group));
  byId("group-back").addEventListener("click", () => go(state.at, state.group - 1));
  byId("group-on").addEventListener("click", () => go(state.at, state.group + 1));
  document.addEventListener("keydown", (e) => keys(e));
  await go(0, Math.max(0, index.steps[0].groups.findIndex((g) => g.moved))); // one in which credit moved, if any
}

async function go(at, group) {
  const steps = state.index.steps;
  at = Math.max(0, Math.min(at, steps.length - 1));
  const groups = steps[at].groups;
  group = Math.max(0, Math.min(group, groups.length - 1));
  const turn = ++state.turn; // of two quick choices the later one wins
  const block = groups.length ? await decode(`g${steps[at].step}-${group}`) : null;
  if (turn !== state.turn) return;
  const names = byId("group");
  names.replaceChildren(...groups.map((g, i) => el("option", { value: i },
    `${g.task} · mean R ${num(g.mean, 2)} · ${g.flat ? "no signal" : g.moved + " of " + g.judged + " credited"}`)));
  Object.assign(state, { at, group, block, rollout: 0, step: 0, open: false, tokens: false });
  byId("step").value = at;
  names.value = group;
  byId("position").textContent = `${state.index.unit} ${steps[at].step + 1}, task ${group + 1} of ${groups.length}`;
  show();
}

function totals(r) { return r.steps.map((s) => (s.a === null ? null : s.a * s.n)); }

function show() {
  const b = state.block;
  for (const id of ["rollouts", "detail", "matrix", "calls", "opening"]) byId(id).replaceChildren();
  if (!b) { byId("rollouts").append(el("p", {}, "No group in this step.")); return; }
  byId("opening").append(el("details", {}, el("summary", {}, `Task ${b.task}: what the agent was told`),
    b.opening.map(([role, text]) => [el("h4", {}, role), el("div", { class: "said" }, text)])));
  const most = Math.max(1e-12, ...b.rollouts.flatMap((r) => totals(r).map((t) => Math.abs(t ?? 0))));
  b.rollouts.forEach((r, i) => byId("rollouts").append(rollout(r, i, most)));
  matrix(b);
  calls(b.calls);
  overview();
}

function rollout(r, i, most) {
  const lost = r.A === null;
  const column = el("div", { class: "rollout", role: "group", "aria-label": `rollout ${r.sample + 1}` },
    el("h4", {}, `Rollout ${r.sample + 1}`),
    el("div", { class: "figures" }, lost ? "not in the group" : [el("span", {}, `R = ${num(r.r)}`), " ", el("span", {}, `A = ${signed(r.A)}`)]),
    el("div", { class: "soft" }, `ended: ${r.end}` + (r.reason ? ` · ${r.reason}` : "") + (r.flat ? " · no signal" : "")),
    r.lost || r.error ? el("div", { class: "lost" }, r.lost || r.error) : null);
  const even = r.A === null ? 0 : r.A * r.steps.reduce((sum, x) => sum + x.n, 0) / r.steps.length;
  totals(r).forEach((total, j) => {
    const ratio = r.reason === "credited" && even ? total / even : 1, share = ratio > 1.05 ? "▲" : ratio < 0.95 ? "▼" : "";
    const colour = total === null || total === 0 ? "" : `background: rgba(var(--${total > 0 ? "up" : "down"}), ${(0.08 + 0.62 * Math.abs(total) / most).toFixed(3)})`;
    const step = el("button", {
      type: "button", class: "step", style: colour, "data-rollout": i, "data-step": j, tabindex: i + j ? "-1" : "0", "aria-expanded": "false",
      "aria-label": `rollout ${r.sample + 1}, step ${j + 1}, total credit ${signed(total, 2)}`,
      onmouseenter: () => { if (!state.open) detail(i, j); }, onfocus: () => { state.rollout = i; state.step = j; detail(i, j); },
      onclick: () => { state.open = true; state.rollout = i; state.step = j; detail(i, j); },
    }, el("span", {}, j + 1), el("span", { class: "text" }, r.steps[j].act.replace(/<\/?code>/g, " ").replace(/\s+/g, " ").trim().slice(0, 160)),
      el("span", { class: "share" }, share), el("span", { class: "figures" }, signed(total, 1)));
    column.append(step);
  });
  return column;
}

function stepNode(i, j) { return document.querySelector(`.step[data-rollout="${i}"][data-step="${j}"]`); }

function light(pairs) {
  for (const node of document.querySelectorAll(".step.lit")) node.classList.remove("lit");
  for (const [i, j] of pairs) stepNode(i, j)?.classList.add("lit");
}

function lightRow(k) {
  for (const row of document.querySelectorAll("#matrix tr.lit")) row.classList.remove("lit");
  if (k !== null) document.querySelector(`#matrix tr[data-criterion="${k}"]`)?.classList.add("lit");
}

function overview() {
  const b = state.block;
  const reasons = new Map();
  b.rollouts.forEach((r) => { if (r.reason) reasons.set(r.reason, [...(reasons.get(r.reason) ?? []), r.sample + 1]); });
  byId("detail").classList.remove("open");
  byId("detail").replaceChildren(el("h4", {}, "Why the credit is as it is"),
    ...[...reasons].map(([reason, who]) => el("p", {}, el("b", {}, `${reason} (rollout ${who.join(", ")}): `), REASONS[reason] ?? "A rule of its own.")),
    el("p", { class: "soft" }, "Hover or focus a step or a criterion."));
}

function arithmetic(r, j) {
  const s = r.steps[j], lines = [];
  const n = r.steps.reduce((sum, x) => sum + x.n, 0);
  lines.push(`n_j = ${s.n} tokens, N = ${n}, A = ${signed(r.A)}`);
  const moved = r.reason === "credited" || (r.reason === "unanimous" && s.q !== null);
  if (s.q !== null && s.q !== undefined) {
    const [p, f] = s.pf;
    lines.push(p + f ? `Q_j = p/(p+f) = ${p}/(${p}+${f}) = ${num(s.q)}` : `Q_j = ${num(s.q)}: nothing cites this step, it takes the mean Q of the cited ones`);
    const w = (q) => (r.A >= 0 ? q : 1 - q);
    lines.push(r.A >= 0 ? `w_j = Q_j = ${num(w(s.q))} (A ≥ 0)` : `w_j = 1 − Q_j = ${num(w(s.q))} (A < 0)`);
    const sum = r.steps.reduce((total, x) => total + w(x.q), 0);
    lines.push(`Σ w = ${num(sum)} over ${r.steps.length} steps`);
    if (moved && s.a !== r.A) lines.push(`a_j = A·N·w_j/(n_j·Σw) = ${signed(r.A)}·${n}·${num(w(s.q))}/(${s.n}·${num(sum)}) = ${signed(s.a)}`);
    else lines.push(`a_j = ${signed(s.a)} (as recorded)`);
  } else lines.push(`a_j = ${signed(s.a)}` + (s.a === r.A ? " = A" : " (as recorded)"));
  const total = s.a * s.n, whole = r.A * n;
  lines.push(`n_j·a_j = ${signed(total, 2)}` + (whole ? `, ${num(100 * total / whole, 1)}% of A·N = ${signed(whole, 2)}` : ""));
  return lines;
}

function verdictLine(k, i) {
  const v = state.block.verdicts[k][i], [mark, css, word] = SIGN[String(v[0])];
  return el("div", {}, el("span", { class: css }, `${mark} ${word}`), " ", el("b", {}, state.block.criteria[k].title),
    v[1] !== null ? ` (overridden to ${SIGN[String(v[1])][2]}: counts in no Q)` : "", v[3] ? el("div", { class: "soft" }, v[3]) : null);
}

// An open detail stays until it is closed; on a small screen it is pinned to the bottom edge.
function closer() {
  byId("detail").classList.toggle("open", state.open);
  return state.open ? el("button", { type: "button", class: "close", "aria-label": "close the details", onclick: close }, "×") : null;
}

function close() {
  state.open = false;
  for (const node of document.querySelectorAll(".step[aria-expanded=true]")) node.setAttribute("aria-expanded", "false");
  light([]); lightRow(null);
  if (state.block) overview();
}

function detail(i, j) {
  const b = state.block, r = b.rollouts[i], s = r.steps[j];
  for (const node of document.querySelectorAll(".step[aria-expanded=true]")) node.setAttribute("aria-expanded", "false");
  stepNode(i, j)?.setAttribute("aria-expanded", String(state.open));
  light([[i, j]]);
  lightRow(null);
  const citing = b.criteria.map((_, k) => k).filter((k) => b.verdicts[k][i] && b.verdicts[k][i][2].includes(j + 1));
  const parts = [closer(), el("h4", {}, `Rollout ${r.sample + 1}, step ${j + 1} (turn ${s.turn})`)];
  if (r.A !== null) {
    parts.push(el("div", { class: "formula", id: "arithmetic" }, arithmetic(r, j).map((line) => el("div", {}, line))));
    parts.push(el("p", { class: "soft" }, `${r.reason}: ${REASONS[r.reason] ?? "a rule of its own."}`));
  }
  parts.push(el("h4", {}, citing.length ? "Verdicts that cite this step" : "No verdict cites this step"),
    ...citing.map((k) => el("div", { class: b.criteria[k].out ? "na" : "" }, verdictLine(k, i), b.criteria[k].out ? el("div", { class: "soft" }, "dropped: nobody failed it") : null)));
  parts.push(el("h4", {}, "Action"), el("div", { class: "said" }, s.act || "(empty)"));
  if (s.obs) parts.push(el("h4", {}, "Observation"), el("div", { class: "said" }, s.obs));
  const shown = el("div", { class: "tokens", id: "tokens" });
  parts.push(el("button", { type: "button", id: "show-tokens", onclick: () => { state.tokens = !state.tokens; tokens(shown, s); } }, `Tokens (${s.n})`), shown);
  byId("detail").replaceChildren(...parts.filter(Boolean));
  if (state.tokens) tokens(shown, s);
}

function tokens(box, s) {
  box.replaceChildren();
  if (!state.tokens) return;
  const colour = s.a ? `background: rgba(var(--${s.a > 0 ? "up" : "down"}), .25)` : "";
  if (!s.tok.some((id) => id >= 0)) box.append(el("p", { class: "soft" }, "No token ids: the trajectory came from elsewhere."));
  else s.tok.forEach((id, t) => box.append(el("span", { style: colour, title: `id ${id}, log-prob ${num(s.lp[t])}, a ${signed(s.a)}` }, state.block.pieces[id] ?? `#${id}`)));
}

function criterion(k, only = null) {
  const b = state.block, c = b.criteria[k];
  light(b.rollouts.flatMap((_, i) => only !== null && i !== only ? [] : (b.verdicts[k][i]?.[2] ?? []).map((j) => [i, j - 1])));
  lightRow(k);
  const parts = [closer(), el("h4", {}, c.title), el("p", {}, c.text), el("p", { class: "soft" }, `How it is judged: ${c.how}`),
    el("p", { class: "soft" }, `Written by: ${c.source}. ${c.out ? "Dropped: nobody failed it, so it tells none from another." : "Survived dropout."}`)];
  b.rollouts.forEach((r, i) => {
    const v = b.verdicts[k][i];
    if (!v || (only !== null && i !== only)) return;
    parts.push(el("h4", {}, `Rollout ${r.sample + 1}: ${SIGN[String(v[0])][2]}` + (v[2].length ? `, cites step ${v[2].join(", ")}` : "")), el("div", {}, v[3]));
    if (only !== null) for (const [name, text] of [["Evidence", v[4]], ["Attribution", v[5]]]) if (text) parts.push(el("p", {}, el("b", {}, name + ": "), text));
  });
  byId("detail").replaceChildren(...parts.filter(Boolean));
}

function matrix(b) {
  if (!b.criteria.length) { byId("matrix").append(el("p", { class: "soft" }, "No criteria: this setting's reward does not come from a rubric, or the group was skipped.")); return; }
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Criterion"), b.rollouts.map((r) => el("th", { scope: "col" }, r.sample + 1)))));
  const body = el("tbody");
  b.criteria.forEach((c, k) => {
    const row = el("tr", { class: c.out ? "out" : "", "data-criterion": k, onmouseenter: () => { if (!state.open) criterion(k); } },
      el("th", { scope: "row" }, el("button", { type: "button", onclick: () => { state.open = false; criterion(k); }, onfocus: () => criterion(k) }, c.title), c.out ? " (dropped: nobody failed it)" : "", el("div", { class: "soft" }, c.text)));
    b.verdicts[k].forEach((v, i) => {
      if (!v) { row.append(el("td", { title: "not judged" }, "·")); return; }
      const [mark, css, word] = SIGN[String(v[0])];
      row.append(el("td", {}, el("button", { type: "button", class: css, "aria-label": `${c.title}, rollout ${b.rollouts[i].sample + 1}: ${word}`, title: v[3],
        onclick: () => { state.open = true; criterion(k, i); }, onfocus: () => criterion(k, i) }, mark + (v[1] !== null ? "*" : ""))));
    });
    body.append(row);
  });
  // Where R comes from: the surviving verdicts of every rollout.
  const counted = (i, score) => b.criteria.filter((c, k) => !c.out && b.verdicts[k][i] && b.verdicts[k][i][0] === score).length;
  const foot = (name, cell) => el("tr", {}, el("th", { scope: "row" }, name), b.rollouts.map((r, i) => el("td", {}, r.r === null ? "–" : cell(r, i))));
  table.append(body, el("tfoot", {}, foot(["p, f", el("span", { class: "wide" }, ": surviving passes and fails")], (r, i) => `${counted(i, 1)}✓ ${counted(i, -1)}✗`),
    foot(["R", el("span", { class: "wide" }, " = (p − f)/(p + f)")], (r) => num(r.r)), foot(["A", el("span", { class: "wide" }, " = (R − mean)/std")], (r) => signed(r.A))));
  byId("matrix").append(table);
  if (b.verdicts.some((row) => row.some((v) => v && v[1] !== null))) byId("matrix").append(el("p", { class: "soft" }, "* the attribution call overrode this verdict"));
}

function calls(list) {
  if (!list.length) { byId("calls").append(el("p", { class: "soft" }, "No judge call is archived for this group.")); return; }
  const bill = (some) => { const sum = some.reduce((s, c) => s + (c.usd ?? 0), 0); return some.every((c) => c.usd !== null) ? (sum ? `$${sum.toFixed(4)}` : "free") : `at least $${sum.toFixed(4)} (a model has no known price)`; };
  const head = (names) => el("thead", {}, el("tr", {}, names.map((h) => el("th", { scope: "col" }, h)))), figure = (v) => el("td", { class: "figure" }, v);
  byId("calls").append(el("p", {}, `${list.length} calls, ${bill(list)}`));
  const phases = [...new Set(list.map((c) => c.phase))].map((phase) => [phase, list.filter((c) => c.phase === phase)]);
  const sum = (some, key) => some.reduce((s, c) => s + c[key], 0);
  byId("calls").append(el("table", {}, head(["phase", "calls", "tokens in", "tokens out", "cost", "time"]), el("tbody", {}, phases.map(([phase, some]) =>
    el("tr", {}, el("td", {}, phase), figure(some.length), figure(sum(some, "in")), figure(sum(some, "out")), figure(bill(some)), figure(sum(some, "s").toFixed(2) + " s"))))));
  const body = el("tbody");
  list.forEach((c) => {
    const reply = el("td", {});
    reply.append(el("button", { type: "button", onclick: () => reply.replaceChildren(el("div", { class: "said" }, c.reply || c.error || "(empty)")) }, "show"));
    body.append(el("tr", {}, el("td", {}, c.phase), el("td", {}, c.sample < 0 ? "group" : c.sample + 1), el("td", {}, c.outcome + (c.attempt > 1 ? ` (attempt ${c.attempt})` : "")),
      el("td", {}, c.model), figure(c.in), figure(c.out), figure(c.usd === null ? "unknown" : "$" + c.usd.toFixed(4)), figure(c.s.toFixed(2) + " s"), reply));
  });
  byId("calls").append(el("details", {}, el("summary", {}, "Every call, with its reply"), el("table", {}, head(["phase", "rollout", "outcome", "model", "tokens in", "tokens out", "cost", "time", "reply"]), body)));
}

function summary(index) {
  const body = byId("summary-body");
  byId("tiles").append(...index.tiles.map(([value, name]) => el("div", { class: "tile", role: "listitem" }, el("b", {}, value), el("span", {}, name))));
  index.notes.forEach((note) => body.append(el("p", { class: "soft" }, note)));
  body.append(el("h3", {}, "summary.json"), index.summary.length ? el("dl", {}, index.summary.map(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])) : el("p", { class: "soft" }, "No summary.json: the run is not finished, or it trained nothing."));
  const names = ["split", "checkpoint", "n", "tgc", "sgc", "turns", "cost_usd", "quarantined", "unevaluated"];
  const cell = (e, k) => typeof e[k] !== "number" ? e[k] ?? "–" : k === "tgc" || k === "sgc" ? (100 * e[k]).toFixed(1) + "%" : k === "turns" ? e[k].toFixed(1) : k === "cost_usd" ? "$" + e[k].toFixed(2) : e[k];
  byId("evaluations").append(index.evaluations.length ? el("table", {}, el("thead", {}, el("tr", {}, names.map((n) => el("th", { scope: "col" }, n)))),
    el("tbody", {}, index.evaluations.map((e) => el("tr", {}, names.map((k) => el("td", {}, cell(e, k))))))) : el("p", { class: "soft" }, "No evaluation."));
}

function curve(c) {
  const W = 270, H = 120, L = 46, R = 8, T = 8, B = 18, ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  const add = (tag, options, text) => { const n = document.createElementNS(ns, tag); for (const [k, v] of Object.entries(options)) n.setAttribute(k, v); if (text !== undefined) n.textContent = text; svg.append(n); return n; };
  svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
  svg.setAttribute("role", "img");
  const [x0, x1, y0, y1] = [Math.min(...c.x), Math.max(...c.x), Math.min(...c.y), Math.max(...c.y)];
  const px = (x) => L + (W - L - R) * (x1 > x0 ? (x - x0) / (x1 - x0) : 0.5), py = (y) => H - B - (H - T - B) * (y1 > y0 ? (y - y0) / (y1 - y0) : 0.5);
  const short = (v) => Math.abs(v) >= 1e5 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1) : String(Number(v.toPrecision(3))), minus = (v) => short(v).replace(/-/g, "−");
  add("line", { x1: L, x2: W - R, y1: H - B, y2: H - B });
  add("line", { x1: L, x2: L, y1: T, y2: H - B });
  if (c.x.length > 1) add("path", { d: c.x.map((x, i) => `${i ? "L" : "M"}${px(x).toFixed(1)} ${py(c.y[i]).toFixed(1)}`).join("") });
  if (c.x.length < 13) c.x.forEach((x, i) => add("circle", { cx: px(x), cy: py(c.y[i]), r: 2.5 }));
  add("text", { x: L - 4, y: (y1 > y0 ? py(y1) : py(y0)) + 4, "text-anchor": "end" }, minus(y1));
  if (y1 > y0) add("text", { x: L - 4, y: H - B, "text-anchor": "end" }, minus(y0));
  add("text", { x: L, y: H - 4 }, x1 > x0 ? `step ${x0}` : "");
  add("text", { x: x1 > x0 ? W - R : px(x0), y: H - 4, "text-anchor": x1 > x0 ? "end" : "middle" }, x1 > x0 ? x1 : `step ${x0}`);
  svg.setAttribute("aria-label", `${c.name}: from ${short(c.y[0])} at step ${x0} to ${short(c.y[c.y.length - 1])} at step ${x1}`);
  const last = c.x.length - 1, said = el("span", {}), say = (i) => { said.textContent = `${i === last ? "last" : "step " + c.x[i]} ${minus(c.y[i])}`; };
  const at = add("line", { class: "at", y1: T, y2: H - B, visibility: "hidden" });
  say(last);
  svg.addEventListener("pointermove", (e) => {
    const box = svg.getBoundingClientRect(), x = (e.clientX - box.left) * W / box.width;
    const i = c.x.reduce((best, v, k) => (Math.abs(px(v) - x) < Math.abs(px(c.x[best]) - x) ? k : best), 0);
    at.setAttribute("x1", px(c.x[i])); at.setAttribute("x2", px(c.x[i])); at.setAttribute("visibility", "visible");
    say(i);
  });
  svg.addEventListener("pointerleave", () => { at.setAttribute("visibility", "hidden"); say(last); });
  return el("figure", { class: "curve" }, el("figcaption", {}, c.name, " · ", said), svg);
}

function curves(list) {
  const drawn = list.filter((c) => c.x.length);
  byId("curve-grid").append(...drawn.filter((c) => c.first).map(curve));
  if (!drawn.length) byId("curve-grid").append(el("p", { class: "soft" }, "No metrics."));
  const more = byId("more-curves");
  more.addEventListener("toggle", () => { const grid = more.querySelector(".grid"); if (more.open && !grid.childElementCount) grid.append(...drawn.filter((c) => !c.first).map(curve)); });
}

function keys(e) {
  if (e.ctrlKey || e.metaKey || e.altKey || ["SELECT", "INPUT", "TEXTAREA"].includes(e.target.tagName)) return;
  const b = state.block, within = e.target.classList?.contains("step") || e.target === document.body;
  const focus = (i, j) => {
    if (!b || !b.rollouts.length) return;
    i = Math.max(0, Math.min(i, b.rollouts.length - 1));
    j = Math.max(0, Math.min(j, b.rollouts[i].steps.length - 1));
    const node = stepNode(i, j);
    if (node) { for (const s of document.querySelectorAll(".step")) s.tabIndex = -1; node.tabIndex = 0; node.focus(); node.scrollIntoView({ block: "nearest", inline: "nearest" }); }
  };
  const inMatrix = e.target.closest?.("#matrix");
  if (inMatrix && e.key.startsWith("Arrow")) {
    const cell = e.target.closest("th, td"), row = cell.parentElement, at = [...row.children].indexOf(cell);
    const to = { ArrowUp: row.previousElementSibling?.children[at], ArrowDown: row.nextElementSibling?.children[at], ArrowLeft: row.children[at - 1], ArrowRight: row.children[at + 1] }[e.key];
    to?.querySelector("button")?.focus();
  } else if (within && e.key === "ArrowDown") focus(state.rollout, state.step + (e.target === document.body ? 0 : 1));
  else if (within && e.key === "ArrowUp") focus(state.rollout, state.step - 1);
  else if (within && e.key === "ArrowRight") focus(state.rollout + 1, state.step);
  else if (within && e.key === "ArrowLeft") focus(state.rollout - 1, state.step);
  else if (e.key === "]") { go(state.at, state.group + 1); return; }
  else if (e.key === "[") { go(state.at, state.group - 1); return; }
  else if (e.key === ".") { go(state.at + 1, state.group); return; }
  else if (e.key === ",") { go(state.at - 1, state.group); return; }
  else if (e.key === "m") document.querySelector("#matrix button")?.focus();
  else if (e.key === "t") byId("show-tokens")?.click();
  else if (e.key === "Escape") close();
  else return;
  e.preventDefault();
}

start().catch(fault);
