import { bytes, clock, duration, el, labels, peer } from "./dom.js";
import { flows, whom } from "./data.js";
import { table } from "./table.js";

// The keys of a filter, as `heddle observe` has them, with what may stand there.
const KEYS = [
  ["from", "From", "shop/*, 10.244.0.0/16"], ["to", "To", "web"], ["label", "Label", "app=web"], ["port", "Port", "80"],
  ["verdict", "Verdict", ["allowed", "denied", "cut", "failed"]], ["event", "Event", ["open", "fallback", "end", "fail", "deny", "cut"]],
  ["path", "Path", ["direct", "local", "loopback", "overlay", "node", "outside", "stack"]], ["reason", "Reason", "fallback_*"], ["since", "Since", "10m"],
];

// filterForm has a field for each key; what is chosen goes to the address line.
export function filterForm(address) {
  const fields = KEYS.map(([key, title, what]) => {
    const value = address.get(key) ?? "";
    const field = Array.isArray(what)
      ? el("select", { name: key }, el("option", { value: "" }, "any"), what.map((w) => el("option", { value: w, selected: w === value }, w)))
      : el("input", { name: key, value, placeholder: what, size: 12, autocomplete: "off" });
    return el("label", {}, title, field);
  });
  const form = el("form", { role: "search", "aria-label": "Filter of flows" }, fields,
    el("button", { type: "submit" }, "Show"), el("button", { type: "button", onclick: () => address.set(Object.fromEntries(KEYS.map(([k]) => [k, ""]))) }, "All"));
  const choose = (e) => {
    e.preventDefault();
    address.set(Object.fromEntries(new FormData(form)));
  };
  form.addEventListener("submit", choose);
  for (const select of form.querySelectorAll("select")) select.addEventListener("change", choose);
  return form;
}

export function filterOf(address) {
  return Object.fromEntries(KEYS.map(([key]) => [key, address.getAll(key)]));
}

// carried is what a connection carried, where that is known: when it is over.
function carried(f, n) {
  return (f.event === "end" || f.event === "cut") && !f.relayed ? bytes(n) : "";
}

function why(f) {
  const rule = f.policy ? `${f.reason ?? ""} ${f.rule || f.policy}` : f.reason;
  return [rule, f.error].filter(Boolean).join("; ");
}

export function view(address) {
  const t = table("Flows", [
    { title: "Time", of: (f) => clock(f.time) },
    { title: "Node", of: (f) => f.node },
    { title: "Event", of: (f) => f.event, kind: (f) => f.verdict },
    { title: "From", of: (f) => peer(f.from) },
    { title: "To", of: (f) => peer(f.to) },
    { title: "Path", of: (f) => f.path },
    { title: "Why", of: why },
    { title: "Sent", of: (f) => carried(f, f.bytes_sent), number: true },
    { title: "Received", of: (f) => carried(f, f.bytes_received), number: true },
    { title: "RTT", of: (f) => duration(f.rtt_ns), number: true },
    { title: "Sent again", of: (f) => String(f.retransmits || ""), number: true },
    { title: "Took", of: (f) => duration(f.duration_ns), number: true },
    { title: "Labels", of: (f) => [labels(f.from.labels), labels(f.to.labels)].filter(Boolean).join(" → ") },
  ]);
  return {
    nodes: [filterForm(address), t.box],
    async load(signal) {
      const got = await flows(filterOf(address), signal);
      t.show(got.flows);
      const most = got.full ? `, the latest ${got.each} of each node` : "";
      return { ...got, said: `${got.flows.length} flows${most}${got.lost ? `, ${got.lost} lost` : ""}${whom(got)}` };
    },
  };
}
