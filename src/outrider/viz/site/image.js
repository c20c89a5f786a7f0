"use strict";
/* Images that grow: every code appears with the pass that wrote it. */
const $ = id => document.getElementById(id);
const given = JSON.parse($("drawn").textContent);

function made(name, attributes, ...children) {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => one.setAttribute(key, value));
  one.append(...children);
  return one;
}

function titled(text, drawing) {
  const box = document.createElement("div"), title = document.createElement("span");
  title.textContent = text;
  box.append(drawing, title);
  return box;
}

function square(grid, label) {
  return made("svg", {viewBox: `0 0 ${grid} ${grid}`, role: "img", "aria-label": label});
}

/* The three squares and the bars of one image, and what brings them to a pass. */
function pictureOf(one) {
  const {grid, rounds, origins} = one, last = Math.max(...rounds), cells = rounds.map((_, i) => ({x: i % grid, y: Math.floor(i / grid)}));
  const cell = (i, shape, size = 1) => made("rect", {...cells[i], width: size, height: size, class: shape});
  const image = square(grid, "The image"), origin = square(grid, "Origin of every code"), order = square(grid, "Pass of every code");
  image.append(made("image", {href: one.image, width: grid, height: grid}));
  const covers = rounds.map((_, i) => cell(i, "waiting"));
  const colours = rounds.map((pass, i) => cell(i, origins[i], 0.94));
  const shades = rounds.map((pass, i) => cell(i, "", 0.94));
  rounds.forEach((pass, i) => {
    const title = `Row ${cells[i].y + 1}, column ${cells[i].x + 1}: pass ${pass + 1}, ${origins[i]}`;
    [colours[i], shades[i]].forEach(rect => rect.append(made("title", {}, title)));
    shades[i].setAttribute("fill", `hsl(${265 - 215 * pass / Math.max(1, last)} 60% ${25 + 45 * pass / Math.max(1, last)}%)`);
  });
  image.append(...covers); origin.append(...colours); order.append(...shades);
  const bars = made("svg", {viewBox: `0 0 ${grid} ${grid}`, class: "bars", role: "img", "aria-label": "Passes of every row"});
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  figure.append(titled("image", image), titled("origin of codes", origin), titled("pass of codes, dark to bright", order),
    titled("passes of each row", bars), caption);
  return {figure, last, show(pass) {
    const written = rounds.map(number => number < pass);
    written.forEach((is, i) => {
      covers[i].style.display = is ? "none" : "";
      [colours[i], shades[i]].forEach(rect => { rect.style.display = is ? "" : "none"; });
    });
    const rows = [...Array(grid).keys()].map(row => new Set(rounds.filter((number, i) => cells[i].y === row && number < pass)).size);
    bars.replaceChildren(...rows.flatMap((count, row) => [
      made("rect", {x: 0, y: row + 0.15, width: count * 0.5, height: 0.7, class: "passes"}),
      made("text", {x: count * 0.5 + 0.15, y: row + 0.68}, String(count))]));
    const codes = written.filter(is => is).length, kept = origins.filter((name, i) => written[i] && name === "accepted").length;
    caption.textContent = `${codes} of ${rounds.length} codes after ${Math.min(pass, last + 1)} passes; ${kept} of them guessed.`;
  }};
}

const pictures = given.images.map(pictureOf), most = 1 + Math.max(...pictures.map(one => one.last));
let timer = null;

function at(pass) {
  $("at").value = pass;
  pictures.forEach(one => one.show(pass));
  $("where").textContent = `After pass ${pass} of ${most}`;
}

function stop() { clearInterval(timer); timer = null; $("play").textContent = "Play"; }

function play() {
  if (timer !== null) return stop();
  let pass = Number($("at").value) >= most ? 0 : Number($("at").value);
  $("play").textContent = "Stop";
  timer = setInterval(() => { at(++pass); if (pass >= most) stop(); }, 250);
}

$("model").textContent = given.title;
$("at").max = most;
$("at").addEventListener("input", () => { stop(); at(Number($("at").value)); });
$("play").addEventListener("click", play);
$("pictures").append(...pictures.map(one => one.figure));
at(most);
if (!matchMedia("(prefers-reduced-motion: reduce)").matches) play();
