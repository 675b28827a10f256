// What the views are made with: elements, and figures as people read them.

const SVG = "http://www.w3.org/2000/svg";

// el makes an element. Attributes that begin with "on" are listeners; null and false are left out.
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return node;
}

export function bytes(n) {
  if (!n) return "0 B";
  const unit = Math.min(Math.floor(Math.log2(n) / 10), 5);
  return `${(n / 2 ** (10 * unit)).toPrecision(unit ? 3 : 4).replace(/\.?0+$/, "")} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][unit]}`;
}

// duration is of nanoseconds.
export function duration(ns) {
  if (!ns) return "";
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (ns >= size) return `${(ns / size).toPrecision(3)} ${unit}`;
  }
  return `${ns} ns`;
}

export function clock(time) {
  return new Date(time).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3, hour12: false });
}

export function labels(of) {
  return Object.entries(of ?? {}).map(([k, v]) => `${k}=${v}`).join(" ");
}

// pages leads to the pages of a list, by the address line.
export function pages(address, box, total, size) {
  const now = Number(address.get("page") ?? 0), last = Math.max(0, Math.ceil(total / size) - 1);
  const to = (n, text) => el("button", { type: "button", disabled: n < 0 || n > last, onclick: () => address.set({ page: n ? String(n) : "" }) }, text);
  const focused = box.contains(document.activeElement);
  box.replaceChildren(to(now - 1, "Before"), ` ${total ? now * size + 1 : 0} to ${Math.min(total, (now + 1) * size)} of ${total} `, to(now + 1, "More"));
  if (focused) box.querySelector("button:not([disabled])")?.focus();
}

// peer names one end of a flow.
export function peer(p) {
  const name = p.endpoint || (p.node ? `node ${p.node}` : p.addr) || "?";
  return p.port ? `${name}:${p.port}` : name;
}
