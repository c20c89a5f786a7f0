"use strict";
/* Two races: plain against the chosen method as text, and all methods that can run here as a chart. */
/* Another text, so that methods with a memory have not seen the one that is measured. */
const WARM_UP = [{role: "user", content: "In the morning, the bird and the cat went out to look for"}];

/* When each round of a side ended, by the server's own clock, with its pieces. */
function timeline(seen) {
  let clock = 0;
  return seen.map(round => ({at: clock += round.seconds, pieces: round.pieces, drafted: round.tokens.length - 1, accepted: round.path.length}));
}

function written(steps) { return steps.reduce((n, step) => n + step.pieces.length, 0); }
function textOf(steps) { return steps.flatMap(step => step.pieces.map(piece => piece.text)).join(""); }
function speedOf(steps) { return written(steps) / steps.at(-1).at; }

function replayLane(name, steps, now, wanted) {
  const box = $(name + "-text"), shown = Number(box.dataset.shown || 0);
  const due = steps.filter(step => step.at <= now);
  due.slice(shown).forEach(step => box.append(...step.pieces.map(span)));
  box.dataset.shown = due.length;
  box.scrollTop = box.scrollHeight;
  $(name + "-bar").value = written(due) / wanted;
  show(name + "-time", Math.min(now, steps.at(-1).at).toFixed(2) + " s");
  return due.length === steps.length;
}

/* Wait and draw until all lanes are at their ends. */
async function replayed(draw) {
  const began = performance.now();
  while (!draw((performance.now() - began) / 1000)) await frame();
}

function raceText() {
  if ($("seed").value === "") $("seed").value = 7;
  return [...messages, {role: "user", content: $("prompt").value || "Once upon a time"}];
}

async function measured(conversation, wanted) {
  const seen = [];
  await generate(conversation, wanted, round => seen.push(round));
  return timeline(seen);
}

async function race() {
  const conversation = raceText(), sides = {}, wanted = {plain: {max_tokens: 0, trace: true}, fast: speculation()};
  for (const name of ["plain", "fast"]) { $(name + "-text").replaceChildren(); $(name + "-text").dataset.shown = 0; $(name + "-bar").value = 0; show(name + "-time", ""); }
  for (const name of ["plain", "fast"]) {
    show("race-result", `Measuring ${name === "plain" ? "plain" : "speculative"} decoding alone.`);
    await measured(WARM_UP, wanted[name]);
    sides[name] = await measured(conversation, wanted[name]);
  }
  await replayed(now => ["plain", "fast"].map(name => replayLane(name, sides[name], now, written(sides[name]))).every(Boolean));
  const ratio = sides.plain.at(-1).at / sides.fast.at(-1).at, same = textOf(sides.plain) === textOf(sides.fast);
  show("race-result", `Speculative decoding was ${ratio.toFixed(2)}x as fast, in ${sides.fast.length} passes instead of ${sides.plain.length}; ` +
    (same ? "the texts are identical." : "the texts differ."));
  say("Done.");
}

/* A row of the chart: name, bar, time, and what came out. */
function chartRow(entry) {
  const row = element("tr", {}), bar = element("div", {class: "bar"}), cell = element("td", {class: "track"});
  row.append(element("th", {scope: "row"}, entry.name + (entry.isLossy ? " (lossy)" : "")));
  cell.append(bar);
  row.append(cell);
  const cells = ["", "", "", ""].map(() => element("td", {}));
  row.append(...cells);
  return {...entry, row, bar, cells};
}

/* Bars are as long as the text written so far; the ends say how fast each was. */
function drawChart(rows, now) {
  rows.forEach(({bar, cells, steps}) => {
    const due = steps.filter(step => step.at <= now), isDone = due.length === steps.length;
    bar.style.width = 100 * written(due) / written(steps) + "%";
    bar.classList.toggle("done", isDone);
    cells[0].textContent = Math.min(now, steps.at(-1).at).toFixed(2) + " s";
  });
  return rows.every(({steps}) => steps.at(-1).at <= now);
}

function tellResults(rows) {
  const plain = rows.find(entry => entry.name === "plain");
  rows.sort((a, b) => speedOf(b.steps) - speedOf(a.steps));
  rows.forEach(({row, bar, cells, steps}) => {
    const drafted = steps.reduce((n, step) => n + step.drafted, 0), accepted = steps.reduce((n, step) => n + step.accepted, 0);
    bar.style.width = 100 * speedOf(steps) / speedOf(rows[0].steps) + "%";
    cells[0].textContent = `${Math.round(speedOf(steps))}/s`;
    cells[1].textContent = (speedOf(steps) / speedOf(plain.steps)).toFixed(2) + "x";
    cells[2].textContent = `${(written(steps) / steps.length).toFixed(2)} a pass` + (drafted ? `, ${Math.round(100 * accepted / drafted)}% kept` : "");
    cells[3].textContent = textOf(steps) === textOf(plain.steps) ? "same text" : "other text";
    $("chart").append(row);
  });
  const others = rows.filter(entry => textOf(entry.steps) !== textOf(plain.steps)).length;
  show("all-result", `${rows.length} methods, each alone on the server after a run on another text. The fastest is ${rows[0].name} with ` +
    `${(speedOf(rows[0].steps) / speedOf(plain.steps)).toFixed(2)}x plain decoding; ` +
    (others ? `${others} texts differ. ` : "all texts are identical. ") + "A method with a memory is faster on a text that it has seen before.");
}

/* Measure every method alone, then show all of them side by side at the speed that was measured. */
async function raceAll() {
  const conversation = raceText(), rows = [];
  $("chart").replaceChildren();
  for (const name of known.methods) {
    show("all-result", `Measuring ${name} alone, ${rows.length + 1} of ${known.methods.length}.`);
    const wanted = name === "plain" ? {method: name, trace: true} : {...speculation(), method: name};
    await measured(WARM_UP, wanted);
    rows.push(chartRow({name, steps: await measured(conversation, wanted), isLossy: known.lossy.includes(name)}));
  }
  $("chart").append(...rows.map(entry => entry.row));
  await replayed(now => drawChart(rows, now));
  tellResults(rows);
  say("Done.");
}
