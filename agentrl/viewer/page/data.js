// What the server knows. A token, if one is needed, is in the address after #token= or asked for once.

const kept = new Map();

function token() {
  const given = /[#&]token=([^&]*)/.exec(location.hash);
  if (given) {
    sessionStorage.setItem("agentrl-token", decodeURIComponent(given[1]));
    history.replaceState(null, "", "#/run");
  }
  return sessionStorage.getItem("agentrl-token");
}

async function request(path, signal) {
  const secret = token();
  const answer = await fetch(path, { signal, headers: secret ? { Authorization: `Bearer ${secret}` } : {} });
  if (answer.status === 401) {
    const typed = prompt("This server asks for its token:");
    if (typed) { sessionStorage.setItem("agentrl-token", typed); return request(path, signal); }
  }
  if (!answer.ok) {
    const { detail } = await answer.json().catch(() => ({}));
    throw new Error(Array.isArray(detail) ? detail.map((one) => `${one.loc?.at(-1)}: ${one.msg}`).join("; ") : detail || `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

/** The JSON of a path below /api. */
export async function ask(name, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return (await request(`api/${name}?${new URLSearchParams(given)}`)).json();
}

/** The rows of a run's metrics; only those that are new are fetched. */
export async function metrics(run) {
  const known = kept.get(run) || { generation: 0, rows: [] };
  const found = await ask("metrics", { run, after: known.rows.length, generation: known.generation });
  const rows = [...known.rows.slice(0, found.from), ...found.rows];
  kept.set(run, { generation: found.generation, rows });
  return rows;
}

export const forgetMetrics = (run) => kept.delete(run);

/** Calls `tell` with the news of each run, for ever; `say` with the state of the connection. */
export async function listen(tell, say) {
  for (;;) {
    try {
      const answer = await request("api/events");
      say("");
      let rest = "";
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) if (part.startsWith("data: ")) tell(JSON.parse(part.slice(6)));
      }
    } catch { /* the server has ended, or the network has */ }
    say("not connected");
    await new Promise((done) => setTimeout(done, 2000));
  }
}
