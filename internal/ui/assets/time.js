import uPlot from "./vendor/uplot.js";
import { bytes, duration, el } from "./dom.js";
import { get } from "./data.js";

const MOST = 900; // samples: half an hour

// Samples are kept for as long as the page is open, whichever view shows.
const samples = { at: [], sent: [], received: [], opened: [], again: [], rtt: [] };
// sample takes what all endpoints do.
export async function sample(signal) {
  const got = await get("summary", { by: new URLSearchParams(location.search).get("by") || "app" }, signal);
  if (got.rates) {
    const r = got.rates;
    const values = { at: Date.now() / 1000, sent: r.sent, received: r.received, opened: r.opened, again: r.retransmits, rtt: got.rtt_ns || null };
    for (const [name, list] of Object.entries(samples)) {
      list.push(values[name]);
      if (list.length > MOST) list.shift();
    }
  }
  return got;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chart(title, series, show) {
  const box = el("section", { "aria-label": title }, el("h2", {}, title));
  const axis = { stroke: color("--ink"), grid: { stroke: color("--line"), width: 1 } };
  const plot = new uPlot({
    width: 480, height: 200, axes: [axis, { ...axis, size: 80, values: (_, list) => list.map((v) => (v === null ? "" : show(v))) }],
    series: [{}, ...series.map(([label, variable]) => ({ label, stroke: color(variable), width: 2, spanGaps: true, value: (_, v) => (v === null ? "" : show(v)) }))],
  }, [[], ...series.map(() => [])], box);
  return { box, plot };
}

export function view() {
  const perSecond = (v) => `${Math.round(v * 10) / 10}/s`;
  const charts = [
    [chart("Throughput", [["sent", "--link"], ["received", "--good"]], (v) => `${bytes(Math.round(v))}/s`), ["sent", "received"]],
    [chart("New connections", [["opened", "--link"]], perSecond), ["opened"]],
    [chart("Round trip, median of connections that ended", [["RTT", "--link"]], duration), ["rtt"]],
    [chart("Segments sent again", [["sent again", "--bad"]], perSecond), ["again"]],
  ];
  const last = el("p", { role: "status" });
  return {
    nodes: [last, el("div", { class: "charts" }, charts.map(([c]) => c.box))],
    async load() {
      for (const [{ plot, box }, names] of charts) {
        plot.setSize({ width: Math.max(300, box.clientWidth), height: 200 });
        plot.setData([samples.at, ...names.map((n) => samples[n])]);
      }
      const n = samples.at.length - 1;
      last.textContent = n < 0 ? "The first figures come in a few seconds." : `Now: ${bytes(Math.round(samples.sent[n]))}/s sent, ${perSecond(samples.opened[n])} connections, ${perSecond(samples.again[n])} segments sent again.`;
      return { silent: {}, said: `${samples.at.length} samples` };
    },
  };
}
