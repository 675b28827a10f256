// One page, whose views are chosen by the address line: what is seen can be sent to somebody.
import { el } from "./dom.js";
import * as endpoints from "./endpoints.js";
import * as faults from "./faults.js";
import * as flowList from "./flows.js";
import * as map from "./map.js";
import * as nodes from "./nodes.js";
import * as time from "./time.js";

const EVERY = 2000; // milliseconds between two looks
const VIEWS = { map: ["Map", map], flows: ["Flows", flowList], endpoints: ["Endpoints", endpoints], nodes: ["Nodes", nodes], time: ["Over time", time], faults: ["Faults", faults] };

const main = document.getElementById("main");
const silent = document.getElementById("silent");
const updated = document.getElementById("updated");
const pause = document.getElementById("pause");

// address is the address line's query. set changes keys and shows what that means; the step back
// undoes it.
const address = {
  get: (key) => new URLSearchParams(location.search).get(key),
  getAll: (key) => new URLSearchParams(location.search).getAll(key),
  set(changes) {
    const query = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      if (value) query.set(key, value);
      else query.delete(key);
    }
    go("?" + query);
  },
};

let shown = null; // the view
let looking = null; // AbortController of the look under way
let next = 0; // timer of the next one

function go(where) {
  history.pushState(null, "", where);
  open();
}

function open() {
  const name = Object.hasOwn(VIEWS, address.get("view")) ? address.get("view") : "map";
  document.title = `${VIEWS[name][0]} – Heddle`;
  document.getElementById("views").replaceChildren(...Object.entries(VIEWS).map(([key, [title]]) =>
    el("a", { href: "?view=" + key, "aria-current": key === name ? "page" : null }, title)));
  shown = VIEWS[name][1].view(address);
  main.replaceChildren(...shown.nodes.flat(), el("p", { class: "error", role: "alert", id: "error" }));
  look();
}

async function look() {
  clearTimeout(next);
  looking?.abort();
  const mine = (looking = new AbortController());
  const error = document.getElementById("error");
  try {
    const [gone, got] = await Promise.all([time.sample(mine.signal), shown.load(mine.signal)]);
    const names = Object.entries({ ...gone.silent, ...got.silent });
    const more = Math.max(gone.silent_more ?? 0, got.silent_more ?? 0);
    silent.textContent = names.length ? `Without ${names.map(([node, why]) => `${node} (${why})`).join(", ")}${more ? `, and ${more} more` : ""}` : "";
    updated.textContent = `${got.said}; ${new Date().toLocaleTimeString()}`;
    error.textContent = "";
    performance.mark("shown"); // the first one says how long that took
  } catch (e) {
    if (e.name === "AbortError") return;
    error.textContent = String(e);
  }
  if (mine === looking && pause.getAttribute("aria-pressed") === "false") next = setTimeout(look, document.hidden ? 5 * EVERY : EVERY);
}

document.addEventListener("click", (e) => {
  const link = e.target.closest?.("a[href^='?']");
  if (!link || e.ctrlKey || e.metaKey || e.shiftKey || e.button) return;
  e.preventDefault();
  go(link.getAttribute("href"));
});
window.addEventListener("popstate", open);
pause.addEventListener("click", () => {
  const now = pause.getAttribute("aria-pressed") === "false";
  pause.setAttribute("aria-pressed", String(now));
  pause.textContent = now ? "Go on" : "Pause";
  if (now) clearTimeout(next);
  else look();
});
open();
