import { el } from "./dom.js";
import { get, ofAll } from "./data.js";
import { table } from "./table.js";

export function view() {
  const t = table("Nodes", [
    { title: "Node", of: (n) => n.name },
    { title: "State", of: (n) => n.state, kind: (n) => (n.state === "live" ? "allowed" : n.state) },
    { title: "Underlay", of: (n) => n.underlay },
    { title: "Prefixes", of: (n) => (n.prefixes ?? []).join(" ") },
    { title: "Endpoints", of: (n) => String(n.endpoints), number: true },
    { title: "Version", of: (n) => n.status?.version },
    { title: "Store", of: (n) => (n.status ? (n.status.store.healthy ? "healthy" : n.status.store.error) : ""), kind: (n) => (n.status && !n.status.store.healthy ? "denied" : "") },
    { title: "Since", of: (n) => (n.since ? new Date(n.since).toLocaleString() : "") },
  ]);
  const paths = table("Paths that are not direct", [
    { title: "From", of: (p) => p.from }, { title: "To", of: (p) => p.node }, { title: "State", of: (p) => p.state, kind: () => "failed" },
    { title: "Reason", of: (p) => p.reason }, { title: "Detail", of: (p) => p.detail },
  ]);
  return {
    nodes: [t.box, el("h2", {}, "Paths that are not direct"), paths.box],
    async load(signal) {
      const [{ nodes }, statuses] = await Promise.all([get("nodes", {}, signal), ofAll("status", {}, signal, (a, node) => [{ ...a, of: node }])]);
      const status = new Map(statuses.list.map((s) => [s.of, s]));
      t.show(nodes.map((n) => ({ ...n, status: status.get(n.name) })));
      paths.show(statuses.list.flatMap((s) => (s.direct_paths?.overlay ?? []).map((p) => ({ ...p, from: s.of }))));
      return { silent: statuses.silent, said: `${nodes.length} nodes` };
    },
  };
}
