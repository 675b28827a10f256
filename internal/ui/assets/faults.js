import { el } from "./dom.js";
import { ofAll } from "./data.js";
import { table } from "./table.js";

export function view() {
  const faults = table("Faults", [
    { title: "Node", of: (f) => f.node }, { title: "Reason", of: (f) => f.reason, kind: () => "denied" }, { title: "Endpoint", of: (f) => f.endpoint },
    { title: "Error", of: (f) => f.error }, { title: "Since", of: (f) => new Date(f.since).toLocaleString() },
  ]);
  const checks = table("What machines lack", [
    { title: "Node", of: (c) => c.node }, { title: "Check", of: (c) => c.name }, { title: "State", of: (c) => c.status, kind: (c) => c.status },
    { title: "Found", of: (c) => c.detail }, { title: "Cost", of: (c) => c.cost }, { title: "Remedy", of: (c) => c.remedy },
  ]);
  const counters = table("Fallbacks, drops, refusals and cuts", [
    { title: "Node", of: (c) => c.node }, { title: "Kind", of: (c) => c.kind }, { title: "Reason", of: (c) => c.name },
    { title: "Count", of: (c) => String(c.value), number: true }, { title: "Meaning", of: (c) => c.help },
  ]);
  return {
    nodes: [el("h2", {}, "Faults"), faults.box, el("h2", {}, "What machines lack"), checks.box, el("h2", {}, "Fallbacks, drops, refusals and cuts"), counters.box],
    async load(signal) {
      const { list, silent } = await ofAll("status", {}, signal, (a, node) => [{ ...a, of: node }]);
      const all = (what, keep) => list.flatMap((s) => what(s).filter(keep).map((x) => ({ ...x, node: s.of })));
      const found = all((s) => s.faults ?? [], () => true);
      faults.show(found);
      checks.show(all((s) => s.features ?? [], (c) => c.status !== "ok"));
      counters.show(all((s) => s.counters ?? [], (c) => c.value > 0 && c.kind !== "path"));
      return { silent, said: `${found.length} faults` };
    },
  };
}
