"use strict";
/* What the page shares: finding elements, asking the server, reading its stream. */
const $ = id => document.getElementById(id);
let running = null;  /* the controller of what runs now; Esc and Stop abort it */

function show(id, text) { $(id).textContent = text; }
function problem(text) { $("status").className = "note problem"; show("status", text); }
function say(text) { $("status").className = "note"; show("status", text); }

function element(name, attributes, text) {
  const node = document.createElement(name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function drawn(name, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  return node;
}

function span(piece) {
  const node = element("span", {class: "t " + piece.origin}, piece.text);
  node.title = {accepted: "guessed and accepted", recovered: "corrected", bonus: "the model's own"}[piece.origin];
  return node;
}

function headers() {
  const key = $("key").value;
  return {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})};
}

/* What the controls ask for: the policy's own length, a limit on it, or a fixed one. */
function speculation() {
  const wanted = {trace: true}, guesses = Number($("guesses").value);
  if ($("method").value) wanted.method = $("method").value;
  if ($("length").value === "most") wanted.max_tokens = guesses;
  if ($("length").value === "exactly") guesses ? wanted.num_draft_tokens = guesses : wanted.max_tokens = 0;
  return wanted;
}

/* One request of n choices; calls back with every round and the choice it belongs to. */
async function generate(conversation, wanted, onRound, n = 1) {
  const seed = $("seed").value;
  const body = {model: $("served").value || null, messages: conversation, stream: true, n, temperature: Number($("temperature").value), speculation: wanted,
    max_tokens: Number($("tokens").value), ...(seed === "" ? {} : {seed: Number(seed)})};
  const response = await fetch("/v1/chat/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal});
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", text = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return text;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return text;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        if (!choice.index) text += choice.delta.content || "";
        for (const round of choice.rounds || []) onRound(round, choice.index);
      }
    }
  }
}

/* Run something that Esc stops, and tell how it ended. */
async function guarded(work) {
  running = new AbortController();
  busy(true);
  try { await work(); }
  catch (error) { error.name === "AbortError" ? say("Stopped.") : problem(error.message); }
  finally { running = null; busy(false); refresh(); }
}

/* The next picture frame; throws when somebody stopped what runs. */
function frame() {
  running.signal.throwIfAborted();
  return new Promise(requestAnimationFrame);
}
