import { el } from "./dom.js";

const HEIGHT = 24; // of a row, as style.css has it
const SPARE = 10; // rows that are there above and below what is seen

// table shows rows of which only those in sight are in the document: there may be many thousands.
// A column is {title, of: row => text or node, number, kind: row => class}.
export function table(caption, columns) {
  let rows = [], first = -1, last = -1;
  const head = el("tr", {}, columns.map((c) => el("th", { scope: "col", class: c.number ? "number" : null }, c.title)));
  const body = el("tbody");
  const whole = el("table", { "aria-label": caption }, el("thead", {}, head), body);
  const box = el("div", { class: "rows", tabindex: "0", role: "region", "aria-label": caption, onscroll: () => draw(false) }, whole);

  function room(n) {
    const tr = el("tr", { class: "room", "aria-hidden": "true" });
    tr.style.height = `${n * HEIGHT}px`;
    return tr;
  }

  function line(row, i) {
    return el("tr", { "aria-rowindex": i + 2 }, columns.map((c) => {
      const value = c.of(row) ?? "";
      const kinds = [c.number ? "number" : "", c.kind?.(row) ?? ""].filter(Boolean).join(" ");
      return el("td", { class: kinds || null, title: typeof value === "string" ? value : null }, value);
    }));
  }

  function draw(changed) {
    const from = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - SPARE);
    const to = Math.min(rows.length, from + Math.ceil((box.clientHeight || 800) / HEIGHT) + 2 * SPARE);
    if (!changed && from === first && to === last) return;
    [first, last] = [from, to];
    const seen = rows.slice(from, to).map((row, i) => line(row, from + i));
    body.replaceChildren(room(from), ...seen, room(rows.length - to));
  }

  return {
    box,
    show(list) {
      rows = list;
      whole.setAttribute("aria-rowcount", rows.length + 1);
      if (rows.length) draw(true);
      else body.replaceChildren(el("tr", {}, el("td", { class: "none", colspan: columns.length }, "nothing to show")));
    },
  };
}
