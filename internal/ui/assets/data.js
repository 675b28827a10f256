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

// whom says of how many nodes an answer is, while it is not of all.
export function whom(got) {
  return got.whole ? "" : ` of ${got.answered} of ${got.nodes} nodes so far`;
}

// flows gives the latest of all nodes that a filter chooses, latest first.
export function flows(filter, signal) {
  return get("flows", filter, signal);
}
