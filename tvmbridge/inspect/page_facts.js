// The page of an interactive picture: facts, folding and search, behind page.js in one module.

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
