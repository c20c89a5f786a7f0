"use strict";
/* Passes of the target: a column for each, and in it a block for every request that shared it. */
const COLUMNS = 40, COLUMN = 14, HEIGHT = 150;
let passes = new Map();

function clearPasses() { passes = new Map(); $("passes").replaceChildren(); show("passes-text", "No pass yet."); }

/* Note a round of a choice under the number of its pass. */
function addToPass(round, choice) {
  if (!round.shared) return;
  const number = round.shared.number;
  if (!passes.has(number)) passes.set(number, {...round.shared, rounds: []});
  passes.get(number).rounds.push({choice, nodes: round.tokens.length, accepted: round.path.length, written: round.emitted.length});
  while (passes.size > COLUMNS) passes.delete(passes.keys().next().value);
}

/* Blocks of one pass from the bottom: what each request keeps, what it guessed in vain, and what belongs to others. */
function blocksOf(one) {
  const blocks = [];
  [...one.rounds].sort((a, b) => a.choice - b.choice).forEach(row => {
    blocks.push({kind: "bonus", nodes: 1, row}, {kind: "accepted", nodes: row.accepted, row}, {kind: "vain", nodes: row.nodes - 1 - row.accepted, row});
  });
  const others = one.num_nodes - one.rounds.reduce((n, row) => n + row.nodes, 0);
  return [...blocks, {kind: "others", nodes: others}].filter(block => block.nodes > 0);
}

function drawPasses() {
  const seen = [...passes.values()], tallest = Math.max(8, ...seen.map(one => one.num_nodes)), unit = HEIGHT / tallest;
  const svg = drawn("svg", {width: COLUMNS * COLUMN + 4, height: HEIGHT + 4});
  seen.forEach((one, i) => {
    let y = HEIGHT;
    blocksOf(one).forEach(({kind, nodes, row}) => {
      y -= nodes * unit;
      const block = drawn("rect", {x: i * COLUMN + 2, y: y + 1, width: COLUMN - 3, height: Math.max(1, nodes * unit - 1), class: kind});
      block.append(drawn("title", {}, row ? `Request ${row.choice + 1}: ${row.nodes - 1} guessed, ${row.accepted} accepted` : "Requests of others"));
      svg.append(block);
    });
  });
  $("passes").replaceChildren(svg);
  const last = seen.at(-1);
  if (!last) return;
  const mine = last.rounds.length, sum = pick => last.rounds.reduce((n, row) => n + pick(row), 0);
  const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  show("passes-text", `The last pass scored ${counted(last.num_nodes, "token")} for ${counted(last.num_rows, "request")}` +
    (mine < last.num_rows ? `, ${mine} of them from this page` : "") + `, and wrote ${counted(sum(row => row.written), "token")} here.`);
}
