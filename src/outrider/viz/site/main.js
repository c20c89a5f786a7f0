"use strict";
/* The conversation, the gauges, replays, and what the buttons do. */
const messages = [];
let rounds = [], known = {methods: [], lossy: []};

function paragraph(kind) {
  const node = element("p", {class: kind});
  $("talk").append(node);
  return node;
}

function totals(seen) {
  const sum = pick => seen.reduce((total, round) => total + pick(round), 0);
  const tokens = sum(r => r.emitted.length), drafted = sum(r => r.tokens.length - 1), seconds = sum(r => r.seconds);
  return {tokens, drafted, seconds, accepted: sum(r => r.path.length), passes: seen.length};
}

function gauges(seen) {
  const t = totals(seen);
  show("g-pass", t.passes ? (t.tokens / t.passes).toFixed(2) : "-");
  show("g-acc", t.drafted ? Math.round(100 * t.accepted / t.drafted) + "%" : "none made");
  show("g-tps", t.seconds ? Math.round(t.tokens / t.seconds) : "-");
  show("reasons", t.passes ? `What decided the draft length, by rounds: ${reasonsOf(seen)}.` : "");
}

function busy(on) {
  for (const id of ["go", "race", "race-all", "fresh"]) $(id).disabled = on;
  $("stop").disabled = !on;
  $("save").disabled = on || !rounds.length;
  $("talk").setAttribute("aria-busy", on);
}

/* Several answers to one text: each in a paragraph of its own; the conversation goes on with the first. */
async function talk() {
  const text = $("prompt").value, many = Math.max(1, Number($("many").value));
  if (!text.trim()) { problem("Write something first."); $("prompt").focus(); return; }
  messages.push({role: "user", content: text});
  paragraph("said").textContent = text;
  $("prompt").value = "";
  const nodes = Array.from({length: many}, () => paragraph("answer"));
  const seen = rounds = [];
  $("kept").replaceChildren();
  clearPasses();
  grownAt = 0;
  say("Writing.");
  let answer = "";
  try {
    answer = await generate(messages, speculation(), (round, choice) => {
      nodes[choice].append(...round.pieces.map(span));
      addToPass(round, choice);
      drawPasses();
      if (choice) return;
      seen.push(round);
      $("talk").scrollTop = $("talk").scrollHeight;
      growTree(round, seen.length, number => drawRound(number));
      gauges(seen);
    }, many);
  } finally {
    messages.push({role: "assistant", content: answer || nodes[0].textContent});
    if (seen.length) scrub(seen, number => drawTree(seen[number - 1], number, seen[number - 1].tokens.length > 1));
  }
  say("Done.");
}

async function refresh() {
  try {
    const named = $("served").value;
    const response = await fetch("/v1/speculation" + (named ? "?model=" + encodeURIComponent(named) : ""), {headers: headers()});
    if (!response.ok) throw new Error((await response.json()).error.message);
    known = await response.json();
    show("model", known.model);
    show("g-net", known.net_speedup.toFixed(2) + "x");
    if (!$("served").options.length) {
      known.models.forEach(name => $("served").add(new Option(name, name)));
      $("served-box").classList.toggle("hidden", known.models.length < 2);
    }
    if (!$("method").options.length) {
      $("method").add(new Option(`${known.method} (default)`, ""));
      known.methods.forEach(name => $("method").add(new Option(name + (known.lossy.includes(name) ? " (lossy)" : ""), name)));
    }
  } catch (error) { problem(error.message); }
}

function save() {
  const lines = rounds.map(round => JSON.stringify(round)).join("\n") + "\n", link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines], {type: "application/jsonl"}));
  link.download = "trace.jsonl";
  link.click();
  URL.revokeObjectURL(link.href);
}

/* A slider over the rounds: what to draw is the caller's matter. */
let drawRound = () => {};
function scrub(seen, draw) {
  $("replay").classList.remove("hidden");
  $("at").max = seen.length;
  drawRound = number => { $("at").value = number; show("where", `${number} of ${seen.length}`); draw(number); };
  drawRound(seen.length);
}

/* A recorded trace: the same page without a server. */
function replay(recorded) {
  for (const id of ["form", "race-box", "all-box", "passes-box"]) $(id).classList.add("hidden");
  $("play").classList.remove("hidden");
  show("model", "recorded trace");
  let timer = null;
  const halt = () => { clearTimeout(timer); timer = null; show("play", "Play"); };
  const step = number => {
    drawRound(number);
    if (number < recorded.length) timer = setTimeout(step, Math.max(30, 1000 * recorded[number].seconds), number + 1); else halt();
  };
  $("at").addEventListener("input", halt);
  $("play").addEventListener("click", () => {
    if (timer !== null) return halt();
    show("play", "Pause");
    step(Number($("at").value) < recorded.length ? Number($("at").value) : 1);
  });
  scrub(recorded, number => {
    const seen = recorded.slice(0, number), node = document.createElement("p");
    node.append(...seen.flatMap(round => round.pieces.map(span)));
    $("talk").replaceChildren(node);
    drawTree(recorded[number - 1], number);
    gauges(seen);
  });
}

function begin() {
  messages.length = 0;
  rounds = [];
  for (const id of ["talk", "kept", "tree"]) $(id).replaceChildren();
  for (const id of ["tree-text", "tree-why", "reasons"]) show(id, "");
  clearPasses();
  $("replay").classList.add("hidden");
  busy(false);
  $("prompt").focus();
}

function setLength() {
  $("guesses").disabled = $("length").value === "auto";
  if (!$("guesses").disabled && $("guesses").value === "") $("guesses").value = 4;
}

$("at").addEventListener("input", () => drawRound(Number($("at").value)));
$("length").addEventListener("change", setLength);
$("form").addEventListener("submit", event => { event.preventDefault(); guarded(talk); });
$("race").addEventListener("click", () => guarded(race));
$("race-all").addEventListener("click", () => guarded(raceAll));
$("stop").addEventListener("click", () => running?.abort());
$("save").addEventListener("click", save);
$("key").addEventListener("change", refresh);
$("served").addEventListener("change", () => { $("method").replaceChildren(); begin(); refresh(); });
$("fresh").addEventListener("click", begin);
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) { event.preventDefault(); guarded(talk); }
  if (event.key === "Escape") running?.abort();
});

const recorded = JSON.parse($("trace").textContent);
recorded ? replay(recorded) : refresh();
setLength();
