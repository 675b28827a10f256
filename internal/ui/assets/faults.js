import { el } from "./dom.js";
import { get, whom } from "./data.js";
import { table } from "./table.js";

export function view() {
  const faults = table("Faults", [
    { title: "Node", of: (f) => f.node }, { title: "Reason", of: (f) => f.reason, kind: () => "denied" }, { title: "Endpoint", of: (f) => f.endpoint },
    { title: "Error", of: (f) => f.error }, { title: "Since", of: (f) => new Date(f.since).toLocaleString() },
  ]);
  const checks = table("What machines lack", [
    { title: "Nodes", of: (c) => String(c.count), number: true }, { title: "Such as", of: (c) => c.node }, { title: "Check", of: (c) => c.name }, { title: "State", of: (c) => c.status, kind: (c) => c.status },
    { title: "Found", of: (c) => c.detail }, { title: "Cost", of: (c) => c.cost }, { title: "Remedy", of: (c) => c.remedy },
  ]);
  const counters = table("Fallbacks, drops, refusals and cuts", [
    { title: "Kind", of: (c) => c.kind }, { title: "Reason", of: (c) => c.name },
    { title: "Count", of: (c) => String(c.value), number: true },
    { title: "Nodes", of: (c) => String(c.count), number: true }, { title: "Most on", of: (c) => c.node }, { title: "Meaning", of: (c) => c.help },
  ]);
  return {
    nodes: [el("h2", {}, "Faults"), faults.box, el("h2", {}, "What machines lack"), checks.box, el("h2", {}, "Fallbacks, drops, refusals and cuts"), counters.box],
    async load(signal) {
      const got = await get("faults", {}, signal);
      faults.show(got.faults);
      checks.show(got.checks);
      counters.show(got.counters);
      const shown = got.total > got.faults.length ? `, ${got.faults.length} of them shown` : "";
      return { ...got, said: `${got.total} faults${shown}${whom(got)}` };
    },
  };
}
