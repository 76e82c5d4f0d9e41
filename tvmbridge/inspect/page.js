// The page of an interactive picture: it writes dot for what is unfolded, has Graphviz lay it out,
// and answers the pointer. What is seen when groups are folded is as in picture.py.

const data = JSON.parse(document.getElementById("data").textContent);
const byName = new Map(data.nodes.map((node) => [node.name, node]));
for (const group of Object.values(data.groups)) if (group.node) byName.set(group.node.name, group.node);
const folded = new Set(data.folded);
const element = (id) => document.getElementById(id);
const picture = element("picture");
let graphviz, svg, view, whole, chosen = null, matches = [], at = -1;

// What is seen ------------------------------------------------------------------------------------

/** The outermost folded group around a node, or the node itself. */
const seenAs = (node) => node.groups.find((group) => folded.has(group)) ?? node.name;

function visible() {
  const nodes = new Map(), edges = new Map();
  for (const node of data.nodes) {
    const name = seenAs(node);
    if (!nodes.has(name)) nodes.set(name, byName.get(name));
  }
  for (const [from, to, head] of data.edges) {
    const source = seenAs(byName.get(from)), target = seenAs(byName.get(to));
    if (source === target || edges.has(`${source} ${target}`)) continue;
    edges.set(`${source} ${target}`, [source, target, target === to ? head : ""]);
  }
  return { nodes: [...nodes.values()], edges: [...edges.values()] };
}

const quoted = (text) => `"${text.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;

/** The nodes at a level of nesting, and frames around those of a group, where its first stands. */
function written(nodes, level) {
  const runs = new Map();
  for (const node of nodes) {
    const key = node.groups[level] ?? "";
    runs.set(key, [...(runs.get(key) ?? []), node]);
  }
  let text = "";
  for (const [name, inside] of runs) {
    text += name === ""
      ? inside.map((node) => node.dot).join("")
      : `subgraph ${quoted(name)} {\n${data.groups[name].dot}${written(inside, level + 1)}}\n`;
  }
  return text;
}

function dot({ nodes, edges }) {
  const lines = edges.map(([from, to, head]) =>
    `${quoted(from)} -> ${quoted(to)}${head ? ` [headlabel=${quoted(head)}]` : ""}\n`);
  const quick = nodes.length > 1000 ? "graph [splines=polyline]\n" : "";
  return `digraph {\n${data.head}${quick}${written(nodes, 0)}${lines.join("")}}`;
}

/** Lay out what is unfolded; `keep` is a node or group that stays where it is seen. */
async function draw(keep = null) {
  const before = keep && place(keep);
  status("laying out …");
  await new Promise((done) => setTimeout(done, 15)); // the browser shows it first
  const shown = visible();
  const made = new DOMParser().parseFromString(graphviz.dot(dot(shown)), "image/svg+xml");
  svg?.remove();
  svg = document.importNode(made.documentElement, true);
  whole = svg.getAttribute("viewBox").split(" ").map(Number);
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  for (const part of svg.querySelectorAll("g.node, g.edge, g.cluster")) {
    part.dataset.name = part.querySelector("title").textContent;
    part.querySelector("title").remove(); // the browser would show it as a tooltip
  }
  for (const part of svg.querySelectorAll("title")) part.remove();
  for (const link of svg.querySelectorAll("a")) link.removeAttribute("xlink:href");
  picture.append(svg);
  svg.querySelectorAll("g.node").forEach(squeeze);
  if (before) move(before, keep);
  else view ? look(view) : start();
  status("");
  mark();
  document.body.dataset.nodes = shown.nodes.length;
}

/** Give each line the width that Graphviz reckoned with: the browser's font may be a wider one. */
function squeeze(node) {
  const box = node.querySelector("polygon, path, ellipse").getBBox();
  for (const text of node.querySelectorAll('text[text-anchor="start"]')) {
    const width = 2 * (box.x + box.width / 2 - text.getAttribute("x"));
    if (width < 2 || width > box.width) continue;
    text.setAttribute("textLength", width);
    text.setAttribute("lengthAdjust", "spacingAndGlyphs");
  }
}

/** Where a node or a group is seen: the middle of its upper edge, in the picture's coordinates. */
function place(name) {
  const part = svg?.querySelector(`[data-name=${CSS.escape(name)}]`);
  if (!part) return null;
  const box = part.getBBox(), from = part.getCTM(), to = svg.getCTM().inverse();
  const point = new DOMPoint(box.x + box.width / 2, box.y).matrixTransform(to.multiply(from));
  return { x: point.x, y: point.y };
}

function move(before, name) {
  const now = place(name) ?? before;
  look([view[0] + now.x - before.x, view[1] + now.y - before.y, view[2], view[3]]);
}

function status(text) {
  element("status").textContent = text;
}

// Pan and zoom ------------------------------------------------------------------------------------

function look(box) {
  view = box;
  svg.setAttribute("viewBox", box.join(" "));
}

const fit = () => look([...whole]);

/** A picture that is only tall begins at its top, as large as can be read; any other as a whole. */
function start() {
  const wide = picture.clientWidth / whole[2], scale = Math.min(wide, picture.clientHeight / whole[3]);
  fit();
  if (wide > 0.5 && scale < 0.7) zoom(Math.min(wide, 1) / scale, { x: whole[0] + whole[2] / 2, y: whole[1] });
}

function zoom(factor, { x, y }) {
  const [left, top, width, height] = view;
  look([x - (x - left) / factor, y - (y - top) / factor, width / factor, height / factor]);
}

function point(event) {
  return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
}

const middle = () => ({ x: view[0] + view[2] / 2, y: view[1] + view[3] / 2 });

picture.addEventListener("wheel", (event) => {
  event.preventDefault();
  if (svg) zoom(Math.exp(-event.deltaY / 500), point(event));
}, { passive: false });

let drag = null;
picture.addEventListener("pointerdown", (event) => {
  if (svg && event.button === 0) drag = { from: point(event), x: event.clientX, y: event.clientY };
});
addEventListener("pointermove", (event) => {
  if (!drag || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < 4) return;
  drag.moved = true;
  picture.classList.add("moving");
  const now = point(event);
  look([view[0] + drag.from.x - now.x, view[1] + drag.from.y - now.y, view[2], view[3]]);
});
addEventListener("pointerup", (event) => {
  const clicked = drag && !drag.moved;
  drag = null;
  picture.classList.remove("moving");
  if (clicked) choose(nameAt(event.target));
});

// Facts -------------------------------------------------------------------------------------------

function nameAt(target) {
  return target.closest?.("g.node, g.cluster")?.dataset.name ?? null;
}

const size = (bytes) => bytes < 1e3 ? `${bytes} B` : bytes < 1e6 ? `${(bytes / 1e3).toFixed(1)} kB`
  : `${(bytes / 1e6).toFixed(1)} MB`;
const time = (seconds) => seconds < 1e-3 ? `${(seconds * 1e6).toFixed(0)} µs`
  : `${(seconds * 1e3).toFixed(2)} ms`;
const SHOWN = { bytes: size, seconds: time };
const NAMED = { seconds: "time alone" };

function titleOf(node) {
  const facts = node.facts;
  return [facts.operator ?? facts.submodule, facts.variable].filter(Boolean).join(" → ");
}

/** A link to a node, wherever it is. */
function link(name) {
  const made = document.createElement("a");
  made.textContent = titleOf(byName.get(name)) || name;
  made.onclick = () => go(name);
  return made;
}

function row(table, key, ...values) {
  const cells = table.insertRow();
  cells.insertCell().textContent = key;
  const cell = cells.insertCell();
  values.forEach((value, i) => cell.append(i ? document.createElement("br") : "", value));
}

function choose(name) {
  chosen = name;
  mark();
  const facts = element("facts"), node = byName.get(name);
  facts.replaceChildren();
  if (!node) return;
  const table = document.createElement("table"), heading = document.createElement("h1");
  heading.textContent = titleOf(node);
  for (const [key, value] of Object.entries(node.facts))
    row(table, NAMED[key] ?? key, SHOWN[key]?.(value) ?? String(value));
  const near = (from, to) => data.edges.filter((edge) => edge[to] === name).map((e) => link(e[from]));
  const [reads, readers] = [near(0, 1), near(1, 0)];
  if (reads.length) row(table, "reads", ...reads);
  if (readers.length) row(table, "read by", ...readers);
  facts.append(heading, table);
  const group = data.groups[name];
  if (!group?.depth) return;
  const button = document.createElement("button");
  button.textContent = folded.has(name) ? "unfold" : "fold";
  button.onclick = () => toggle(name);
  facts.append(button);
}

function mark() {
  const hits = new Set(matches.map((name) => seenAs(byName.get(name))));
  picture.classList.remove("chosen");
  for (const part of svg?.querySelectorAll("g.node, g.cluster") ?? []) {
    part.classList.toggle("chosen", part.dataset.name === chosen);
    if (part.matches("g.node.chosen")) picture.classList.add("chosen"); // its edges alone stand out
    part.classList.toggle("match", hits.has(part.dataset.name));
  }
  for (const part of svg?.querySelectorAll("g.edge") ?? [])
    part.classList.toggle("near", part.dataset.name.split("->").includes(chosen));
}

// Folding -----------------------------------------------------------------------------------------

async function toggle(name) {
  if (!data.groups[name]?.depth) return;
  folded.has(name) ? folded.delete(name) : folded.add(name);
  await draw(name);
  choose(name);
}

picture.addEventListener("dblclick", (event) => {
  const name = nameAt(event.target);
  const groups = byName.get(name)?.groups ?? [];
  toggle(data.groups[name] ? name : groups.at(-1));
});

/** Unfold what hides a node, and show it in the middle. */
async function go(name) {
  const hidden = byName.get(name).groups.filter((group) => folded.has(group));
  hidden.forEach((group) => folded.delete(group));
  if (hidden.length) await draw();
  choose(name);
  const found = place(name);
  if (found) look([found.x - view[2] / 2, found.y - view[3] / 2, view[2], view[3]]);
}

// Search ------------------------------------------------------------------------------------------

element("search").addEventListener("input", (event) => {
  const wanted = event.target.value.trim().toLowerCase();
  const has = (node) => Object.values(node.facts).join("\n").toLowerCase().includes(wanted);
  matches = wanted ? data.nodes.filter(has).map((node) => node.name) : [];
  at = -1;
  element("found").textContent = wanted ? `${matches.length} found` : "";
  mark();
});
element("search").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !matches.length) return;
  at = (at + (event.shiftKey ? matches.length - 1 : 1)) % matches.length;
  element("found").textContent = `${at + 1} of ${matches.length}`;
  go(matches[at]);
});

// The rest of the page ----------------------------------------------------------------------------

addEventListener("keydown", (event) => {
  if (!svg || event.target.matches("input, select")) return;
  if (event.key === "+") zoom(1.3, middle());
  else if (event.key === "-") zoom(1 / 1.3, middle());
  else if (event.key === "0") fit();
  else if (event.key === "/") event.preventDefault(), element("search").focus();
  else if (event.key === "Escape") choose(null);
});
element("more").onclick = () => zoom(1.3, middle());
element("less").onclick = () => zoom(1 / 1.3, middle());
element("fit").onclick = () => fit();

function furnish() {
  document.title = element("title").textContent = TITLE;
  for (const [text, color] of data.legend) {
    const item = document.createElement("li"), sample = document.createElement("span");
    sample.style.background = color.includes(":") ? `linear-gradient(90deg, ${color.replace(":", ",")})` : color;
    item.append(sample, text);
    element("legend").append(item);
  }
  const depths = [...new Set(Object.values(data.groups).map((group) => group.depth))].filter(Boolean);
  for (const depth of [...depths.sort(), "never"]) element("depth").add(new Option(depth, depth));
  element("depth").onchange = async (event) => {
    folded.clear();
    for (const [name, group] of Object.entries(data.groups))
      if (String(group.depth) === event.target.value) folded.add(name);
    await draw();
    start();
  };
  element("depth").value = data.groups[data.folded[0]]?.depth ?? "never";
  const timed = data.nodes.filter((node) => node.facts.seconds).sort((a, b) => b.facts.seconds - a.facts.seconds);
  if (!timed.length) return;
  const table = document.createElement("table"), heading = document.createElement("h2");
  heading.textContent = "slowest alone";
  for (const node of timed.slice(0, 10)) row(table, time(node.facts.seconds), link(node.name));
  element("slow").append(heading, table);
}

async function begin() {
  furnish();
  const source = JSON.parse(element("graphviz").textContent);
  const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
  const { Graphviz } = await import(url);
  graphviz = await Graphviz.load();
  await draw();
}

begin().catch((error) => status(`this page cannot be drawn: ${error}`));
