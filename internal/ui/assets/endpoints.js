import { bytes, el, labels, pages } from "./dom.js";
import { get } from "./data.js";
import { table } from "./table.js";

// verdictOf says what the rules make of a connection, and how it came about.
function explanation(x) {
  const side = (name, s) => [el("dt", {}, name), el("dd", {}, s.text)];
  return el("dl", {}, el("dt", {}, "Verdict"), el("dd", { class: x.verdict === "allow" ? "allowed" : "denied" }, x.verdict),
    side("Egress", x.egress), side("Ingress", x.ingress));
}

function explainForm(address) {
  const answer = el("div", { "aria-live": "polite" });
  const field = (name, title, size) => el("label", {}, title, el("input", { name, size, required: true, value: address.get(name) ?? "" }));
  const ask = async () => {
    try {
      const x = await get("explain", { from: address.get("source"), to: address.get("destination"), port: address.get("dport") });
      answer.replaceChildren(explanation(x));
    } catch (e) {
      answer.replaceChildren(el("p", { class: "error" }, String(e)));
    }
  };
  const form = el("form", { "aria-label": "Would it be allowed?", onsubmit: (e) => { e.preventDefault(); address.set(Object.fromEntries(new FormData(form))); } },
    field("source", "May", 16), field("destination", "connect to", 16), field("dport", "at port", 6), el("button", { type: "submit" }, "Explain"));
  if (address.get("source")) ask();
  return [form, answer];
}

export function view(address) {
  const t = table("Endpoints", [
    { title: "Node", of: (e) => e.node },
    { title: "Endpoint", of: (e) => el("a", { href: "?" + new URLSearchParams({ view: "flows", from: e.name }) }, e.name) },
    { title: "Addresses", of: (e) => (e.addrs ?? []).join(" ") },
    { title: "Kind", of: (e) => (e.intercepted ? "intercepted" : "plain") },
    { title: "Live", of: (e) => String(Object.values(e.traffic?.live ?? {}).reduce((a, b) => a + b, 0)), number: true },
    { title: "Opened", of: (e) => String(e.traffic?.opened ?? ""), number: true },
    { title: "Accepted", of: (e) => String(e.traffic?.accepted ?? ""), number: true },
    { title: "Sent", of: (e) => bytes(e.traffic?.bytes_sent), number: true },
    { title: "Received", of: (e) => bytes(e.traffic?.bytes_received), number: true },
    { title: "Sent again", of: (e) => String(e.traffic?.retransmits || ""), number: true },
    { title: "Labels", of: (e) => labels(e.labels) },
  ]);
  const policies = el("p"), turn = el("p", { class: "pages" });
  const fields = ["node", "name", "label"];
  const form = el("form", { role: "search", "aria-label": "Filter of endpoints", onsubmit: (e) => { e.preventDefault(); address.set({ ...Object.fromEntries(new FormData(form)), page: "" }); } },
    fields.map((f, i) => el("label", {}, ["Node", "Name or address", "Label"][i], el("input", { name: f, size: 14, value: address.get(f) ?? "", placeholder: ["n1", "shop/*, 10.244.0.0/16", "app=web"][i] }))),
    el("button", { type: "submit" }, "Show"));
  return {
    nodes: [el("h2", {}, "Would it be allowed?"), explainForm(address), policies, el("h2", {}, "Endpoints"), form, turn, t.box],
    async load(signal) {
      const chosen = Object.fromEntries([...fields, "page"].map((f) => [f, address.get(f)]));
      const [got, rules] = await Promise.all([get("endpoints", chosen, signal), get("policies", {}, signal)]);
      t.show(got.list);
      pages(address, turn, got.total, 200);
      const more = rules.total - rules.names.length;
      policies.textContent = rules.total ? `Policies: ${rules.names.join(", ")}${more ? ` and ${more} more` : ""}` : "No policies: everything is allowed.";
      return { ...got, said: `${got.total} endpoints` };
    },
  };
}
