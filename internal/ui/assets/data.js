// What is asked: of the program that serves this page, which asks the agents.

export class Refused extends Error {
  constructor(error) {
    super(error.message);
    this.field = error.field;
    this.remedy = error.remedy;
  }
  toString() {
    return `${this.field ? this.field + ": " : ""}${this.message}${this.remedy ? ` (${this.remedy})` : ""}`;
  }
}

// get asks for a path with parameters, which may be lists; empty ones are left out.
export async function get(path, parameters = {}, signal) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const v of [value].flat()) if (v) query.append(key, v);
  }
  let response;
  try {
    response = await fetch(`api/${path}?${query}`, { signal });
  } catch (e) {
    if (e.name === "AbortError") throw e;
    throw new Refused({ message: "heddle ui does not answer", remedy: "start it again, and open the address that it prints" });
  }
  const body = await response.json();
  if (!response.ok) throw new Refused(body.error);
  return body;
}

// ofAll asks all nodes. each turns a node's answer into a list; silent says of whom there is none.
export async function ofAll(what, parameters, signal, each) {
  const { nodes, silent } = await get(`all/${what}`, parameters, signal);
  const list = Object.entries(nodes).flatMap(([node, answer]) => each(answer, node));
  return { list, silent };
}

// flows gives those of all nodes that a filter chooses, latest first.
export async function flows(filter, signal) {
  let lost = 0;
  const { list, silent } = await ofAll("flows", { last: "2000", ...filter }, signal, (lines) => lines.flatMap((line) => {
    lost += line.lost ?? 0;
    return line.flow ? [line.flow] : [];
  }));
  list.sort((a, b) => (a.time < b.time ? 1 : a.time > b.time ? -1 : 0));
  return { list, silent, lost };
}

// once leaves out what the node of the other end has seen as well.
export function once(list) {
  return list.filter((f) => f.seen_by === "from" || !f.from.endpoint);
}
