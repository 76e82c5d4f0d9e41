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
