import uPlot from "./vendor/uplot.js";
import { bytes, duration, el, median } from "./dom.js";
import { flows, ofAll, once } from "./data.js";

const MOST = 900; // samples: half an hour

// Samples are kept for as long as the page is open, whichever view shows.
const samples = { at: [], sent: [], received: [], opened: [], again: [], rtt: [] };
let before = null;

// sample takes what all endpoints did since the one before.
export async function sample(signal) {
  const traffic = await ofAll("traffic", {}, signal, (a, node) => a.traffic.map((x) => ({ ...x, node })));
  const now = Date.now() / 1000;
  const of = new Map(traffic.list.map((x) => [JSON.stringify([x.node, x.endpoint_id]), x]));
  if (before) {
    const took = now - before.at;
    const rate = (name) => {
      let n = 0;
      for (const [id, x] of of) n += Math.max(0, x[name] - (before.of.get(id)?.[name] ?? x[name]));
      return n / took;
    };
    const ended = await flows({ since: new Date(before.at * 1000).toISOString(), event: "end" }, signal);
    const rtts = once(ended.list).map((f) => f.rtt_ns).filter(Boolean);
    const values = { at: now, sent: rate("bytes_sent"), received: rate("bytes_received"), opened: rate("opened"), again: rate("retransmits"), rtt: rtts.length ? median(rtts) : null };
    for (const [name, list] of Object.entries(samples)) {
      list.push(values[name]);
      if (list.length > MOST) list.shift();
    }
  }
  before = { at: now, of };
  return traffic.silent;
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
