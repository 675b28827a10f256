import { el, pages } from "./dom.js";
import { get, whom } from "./data.js";
import { table } from "./table.js";

export function view(address) {
  const t = table("Nodes", [
    { title: "Node", of: (n) => n.name },
    { title: "State", of: (n) => n.state, kind: (n) => (n.state === "live" ? "allowed" : n.state) },
    { title: "Underlay", of: (n) => n.underlay },
    { title: "Prefixes", of: (n) => (n.prefixes ?? []).join(" ") },
    { title: "Endpoints", of: (n) => String(n.endpoints), number: true },
    { title: "Version", of: (n) => n.status?.version },
    { title: "Store", of: (n) => (n.status ? (n.status.healthy ? "healthy" : n.status.error) : ""), kind: (n) => (n.status && !n.status.healthy ? "denied" : "") },
    { title: "Since", of: (n) => (n.since ? new Date(n.since).toLocaleString() : "") },
  ]);
  const paths = table("Paths that are not direct", [
    { title: "From", of: (p) => p.from }, { title: "To", of: (p) => p.node }, { title: "State", of: (p) => p.state, kind: () => "failed" },
    { title: "Reason", of: (p) => p.reason }, { title: "Detail", of: (p) => p.detail },
  ]);
  const turn = el("p", { class: "pages" });
  const state = address.get("state") ?? "";
  const form = el("form", { role: "search", "aria-label": "Filter of nodes", onsubmit: (e) => { e.preventDefault(); address.set({ ...Object.fromEntries(new FormData(form)), page: "" }); } },
    el("label", {}, "Name has", el("input", { name: "name", size: 14, value: address.get("name") ?? "" })),
    el("label", {}, "State", el("select", { name: "state" }, ["", "live", "away", "dead"].map((s) => el("option", { value: s, selected: s === state }, s || "any")))),
    el("button", { type: "submit" }, "Show"));
  return {
    nodes: [form, turn, t.box, el("h2", {}, "Paths that are not direct"), paths.box],
    async load(signal) {
      const got = await get("nodes", { name: address.get("name"), state, page: address.get("page") }, signal);
      t.show(got.list);
      paths.show(got.paths);
      pages(address, turn, got.total, 200);
      const states = Object.entries(got.states).map(([s, n]) => `${n} ${s}`).join(", ");
      return { ...got, said: `nodes: ${states || "none"}${got.whole ? "" : "; state" + whom(got)}` };
    },
  };
}
