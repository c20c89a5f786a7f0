"use strict";
/* The tree of a round: drawn level by level, why it has that size in words, and the last ones as thumbnails. */
const LEVEL_MS = 90, KEPT = 16;
let grownAt = 0;  /* when the tree on the screen has grown */

function visible(word) { return word.replace(/\n/g, "\u21b5").replace(/ /g, "\u00b7") || "\u2205"; }

/* Columns by depth, leaves from top to bottom, parents beside the middle of their children. */
function layout(round) {
  const nodes = round.words.map((word, i) => ({word, parent: round.parents[i], children: [], depth: 0, kind: "rejected"}));
  nodes.forEach((node, i) => { if (i) { nodes[node.parent].children.push(i); node.depth = nodes[node.parent].depth + 1; } });
  nodes[0].kind = "root";
  round.path.forEach(i => { nodes[i].kind = "accepted"; });
  const last = round.path.length ? round.path[round.path.length - 1] : 0;
  const deepest = Math.max(...nodes.map(node => node.depth));
  if (round.emitted.length > round.path.length) {
    const end = round.pieces[round.pieces.length - 1];
    nodes.push({word: end.text, parent: last, children: [], depth: nodes[last].depth + 1, kind: end.origin, isLast: true});
    nodes[last].children.unshift(nodes.length - 1);
  }
  let next = 0;
  const place = i => {
    const node = nodes[i];
    node.children.forEach(place);
    node.y = node.children.length ? (nodes[node.children[0]].y + nodes[node.children.at(-1)].y) / 2 : next++;
  };
  place(0);
  return {nodes, height: next, deepest};
}

function colourOf(kind) { return kind === "root" ? "var(--soft)" : `var(--${kind})`; }

/* Guesses appear as they were drafted, one level after the other; then the verdict gives them their colours. */
function treePicture(round, grows) {
  const {nodes, height, deepest} = layout(round), unit = 9, gap = 26, widths = [];
  nodes.forEach(n => { widths[n.depth] = Math.max(widths[n.depth] || 0, visible(n.word).length * unit + 16); });
  const left = widths.map((_, d) => widths.slice(0, d).reduce((a, w) => a + w + gap, 0));
  const svg = drawn("svg", {width: left.at(-1) + widths.at(-1) + 8, height: height * 32 + 8, class: grows ? "grows" : ""});
  nodes.forEach((n, i) => {
    const x = left[n.depth] + 4, y = n.y * 32 + 4, colour = colourOf(n.kind), isRejected = n.kind === "rejected";
    const appears = (n.isLast ? deepest + 1 : n.depth) * LEVEL_MS, settles = (deepest + 1) * LEVEL_MS;
    const group = drawn("g", {style: `--colour:${colour};--appears:${appears}ms;--settles:${settles}ms`, class: n.kind});
    const dash = isRejected ? "4 3" : "none";
    if (i) {
      const p = nodes[n.parent], from = left[p.depth] + 4 + visible(p.word).length * unit + 12, py = p.y * 32 + 16;
      group.append(drawn("path", {d: `M${from} ${py} C${x - 12} ${py} ${x - 16} ${y + 12} ${x} ${y + 12}`, fill: "none",
        "stroke-width": isRejected ? 1 : 2.5, "stroke-dasharray": dash}));
    }
    const back = n.kind === "root" || isRejected ? "none" : `var(--${n.kind}-back)`;
    group.append(drawn("rect", {x, y, rx: 5, width: visible(n.word).length * unit + 12, height: 24, fill: back, "stroke-dasharray": dash}));
    group.append(drawn("text", {x: x + 6, y: y + 17}, visible(n.word)));
    svg.append(group);
  });
  return {svg, grownMs: (deepest + 2) * LEVEL_MS};
}

/* The same as dots and lines. */
function thumbnail(round) {
  const {nodes, height} = layout(round), width = 12 * (1 + Math.max(...nodes.map(n => n.depth))) + 4, size = 9 * height + 4;
  const svg = drawn("svg", {viewBox: `0 0 ${width} ${size}`, height: Math.min(size, 80), "aria-hidden": "true"});
  const at = n => [n.depth * 12 + 6, n.y * 9 + 6];
  nodes.forEach((n, i) => { if (i) { const [x, y] = at(n), [px, py] = at(nodes[n.parent]); svg.append(drawn("path", {d: `M${px} ${py}L${x} ${y}`, stroke: colourOf(n.kind)})); } });
  nodes.forEach(n => { const [cx, cy] = at(n); svg.append(drawn("circle", {cx, cy, r: 3, fill: colourOf(n.kind)})); });
  return svg;
}

/* Why a round guessed so much, or nothing. */
function whyOf(round) {
  const reason = round.reason, drafted = round.tokens.length - 1;
  if (drafted) return reason ? reason.sentence : "";
  if (!reason) return "Nothing was guessed: this method never guesses.";
  if (round.position + 1 >= Number($("tokens").value)) return "Nothing was guessed: one token is left to write.";
  const planned = {given: "length", calibration: "length", fastest: "length", probe: "length", rule: "length"}[reason.code];
  const isEmpty = planned && reason.numbers[planned] > 0;
  return "Nothing was guessed. " + (isEmpty ? `The plan allows up to ${reason.numbers[planned]} guesses, but the drafter found none to make.` : reason.sentence);
}

/* How often each reason decided, most frequent first. */
function reasonsOf(seen) {
  const counts = {};
  seen.forEach(round => { const code = round.reason ? round.reason.code : "no policy"; counts[code] = (counts[code] || 0) + 1; });
  return Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([code, count]) => `${code} ${count}`).join(", ");
}

function drawTree(round, number, grows = false) {
  const {svg, grownMs} = treePicture(round, grows);
  grownAt = performance.now() + (grows ? grownMs : 0);
  $("tree").replaceChildren(svg);
  const drafted = round.tokens.length - 1;
  show("tree-text", `Round ${number}: ${drafted} guessed, ${round.path.length} accepted, ${round.emitted.length} written in ` +
    `${(1000 * round.seconds).toFixed(1)} ms (${(1000 * round.draft_seconds).toFixed(1)} ms guessing).`);
  show("tree-why", whyOf(round));
}

/* A live round: its tree grows on the screen if the one before has grown, and its thumbnail is kept. */
function growTree(round, number, open) {
  if (performance.now() >= grownAt) drawTree(round, number, round.tokens.length > 1);
  const button = element("button", {type: "button", "aria-label": `Tree of round ${number}`, title: `Round ${number}: ${whyOf(round)}`});
  button.append(thumbnail(round));
  button.addEventListener("click", () => open(number));
  $("kept").append(button);
  while ($("kept").children.length > KEPT) $("kept").firstChild.remove();
  $("kept").scrollLeft = $("kept").scrollWidth;
}
