import { bytes, duration, el, svg } from "./dom.js";
import { get, whom } from "./data.js";
import { filterForm, filterOf } from "./flows.js";
import { table } from "./table.js";

const WIDTH = 170, HEIGHT = 30, GAP = 14, BETWEEN = 190; // of services, in the map's own units
const MOST = 150; // services that are drawn; the table has all

const rate = (n) => (n ? String(Number(n.toPrecision(2))) : "0");
const bad = (e) => e.denied + e.cut + e.failed;

// place gives each service a column behind those that connect to it, and a row.
function place(edges) {
  const column = new Map();
  for (const e of edges) for (const name of [e.from, e.to]) column.set(name, 0);
  for (let i = 0; i < Math.min(column.size, 8); i++) { // cycles end here
    for (const e of edges) if (e.from !== e.to && column.get(e.to) <= column.get(e.from) && column.get(e.from) < 8) column.set(e.to, column.get(e.from) + 1);
  }
  const rows = new Map(), at = new Map();
  for (const [name, x] of column) {
    const y = rows.get(x) ?? 0;
    rows.set(x, y + 1);
    at.set(name, { x: x * (WIDTH + BETWEEN) + 4, y: y * (HEIGHT + GAP) + 4 });
  }
  return { at, height: Math.max(1, ...rows.values()) * (HEIGHT + GAP) + 8, width: Math.max(1, ...[...rows.keys()].map((x) => x + 1)) * (WIDTH + BETWEEN) - BETWEEN + 8 };
}

function link(filter, ...what) {
  return svg("a", { href: "?" + new URLSearchParams({ view: "flows", ...filter }) }, what);
}

function draw(edges, key) {
  const joined = new Map(); // ports of one pair are one line
  for (const e of edges) {
    const id = JSON.stringify([e.from, e.to]);
    const line = joined.get(id) ?? { from: e.from, to: e.to, good: 0, bad: 0, rate: 0 };
    line.rate += e.per_second ?? 0;
    line.good += e.allowed;
    line.bad += bad(e);
    joined.set(id, line);
  }
  const lines = [...joined.values()];
  const { at, height, width } = place(lines);
  const drawn = new Set([...at.keys()].slice(0, MOST));
  const paths = lines.filter((l) => drawn.has(l.from) && drawn.has(l.to)).map((l) => {
    const a = at.get(l.from), b = at.get(l.to), y = HEIGHT / 2;
    const back = b.x <= a.x;
    const x1 = a.x + WIDTH, x2 = back ? b.x + WIDTH : b.x, bend = back ? 90 : (x2 - x1) / 2;
    const d = `M${x1} ${a.y + y} C${x1 + bend} ${a.y + y} ${back ? x2 + bend : x2 - bend} ${b.y + y} ${x2} ${b.y + y}`;
    const what = `${l.from} to ${l.to}: ${l.good} allowed, ${l.bad} denied, cut or failed, ${rate(l.rate)} a second`;
    return svg("g", { class: l.bad ? "edge bad" : "edge" }, svg("title", {}, what), svg("path", { d, "stroke-width": 1 + Math.log10(1 + l.good + l.bad) }));
  });
  const services = [...drawn].map((name) => {
    const { x, y } = at.get(name);
    const text = name.length > 24 ? name.slice(0, 23) + "…" : name;
    const filter = name === "outside" || name.startsWith("node ") ? {} : { label: `${key}=${name}` };
    return link(filter, svg("g", { class: "service" }, svg("title", {}, name), svg("rect", { x, y, width: WIDTH, height: HEIGHT, rx: 5 }),
      svg("text", { x: x + 8, y: y + HEIGHT / 2 + 4 }, text)));
  });
  return svg("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Map of ${at.size} services and ${lines.length} connections between them; the table below says the same` }, paths, services);
}

export function view(address) {
  const key = address.get("by") || "app";
  const picture = el("div");
  const by = el("input", { name: "by", value: key, size: 12 });
  const form = el("form", { "aria-label": "Services", onsubmit: (e) => { e.preventDefault(); address.set({ by: by.value }); } },
    el("label", {}, "Services by label", by), el("button", { type: "submit" }, "Group"));
  const t = table("Connections between services", [
    { title: "From", of: (e) => e.from }, { title: "To", of: (e) => e.to }, { title: "Port", of: (e) => String(e.port || ""), number: true },
    { title: "Per second", of: (e) => rate(e.per_second), number: true },
    { title: "Allowed", of: (e) => String(e.allowed), number: true },
    ...["denied", "cut", "failed"].map((v) => ({ title: v[0].toUpperCase() + v.slice(1), of: (e) => String(e[v] || ""), number: true, kind: (e) => (e[v] ? v : "") })),
    { title: "Path", of: (e) => (e.paths ?? []).join(" ") },
    { title: "Sent", of: (e) => bytes(e.sent), number: true }, { title: "Received", of: (e) => bytes(e.received), number: true },
    { title: "RTT, median", of: (e) => duration(e.rtt_ns), number: true }, { title: "Sent again", of: (e) => String(e.retransmits || ""), number: true },
  ]);
  return {
    nodes: [filterForm(address), form, picture, el("h2", {}, "Connections"), t.box],
    async load(signal) {
      const got = await get("summary", { ...filterOf(address), by: key }, signal);
      const { edges } = got;
      picture.replaceChildren(edges.length ? draw(edges, key) : el("p", { class: "none" }, "No connections yet: what containers open shows here."));
      t.show(edges);
      const busiest = got.total > edges.length ? `the busiest ${edges.length} of ${got.total}` : String(edges.length);
      const left = got.left_out ? `, ${got.left_out} of more services left out` : "";
      return { ...got, said: `${busiest} connections of ${got.flows} flows${left}${whom(got)}` };
    },
  };
}
