// An agent for Node, around npm's openai: it asks two questions. As a command (env: "agent:command node ...") it plays
// one task; otherwise it takes task after task from a run (env: agent:remote), a few at a time.
import { writeFileSync } from "node:fs";
import OpenAI from "openai";

const opposite = { left: "right", right: "left", up: "down", down: "up" };

async function play(task, client) {
  const asked = [2, 4].map((bit) => Object.keys(opposite)[(task.seed >> bit) % 4]); // lower bits say its purpose
  const messages = [];
  let right = 0;
  for (const word of asked) {
    messages.push({ role: "user", content: `What is the opposite of ${word}?` });
    const answer = await client.chat.completions.create({ model: "policy", messages });
    const said = answer.choices[0].message.content ?? "";
    messages.push({ role: "assistant", content: said });
    right += said.trim() === opposite[word];
  }
  return { reward: right / 2, success: right === 2 };
}

const post = (url, key, body) =>
  fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${key}` },
    body: JSON.stringify(body),
  });

async function work(url) {
  for (;;) {
    const taken = await post(`${url}/v1/tasks`, "", {}).catch(() => null); // the run may not listen yet, or any more
    if (taken?.status !== 200) {
      await new Promise((resolve) => setTimeout(resolve, 200));
      continue;
    }
    const { task, base_url, api_key } = await taken.json();
    try {
      const earned = await play(task, new OpenAI({ baseURL: base_url, apiKey: api_key }));
      await post(`${base_url}/rewards`, api_key, { ...earned, done: true });
    } catch (error) {
      await post(`${base_url}/failures`, api_key, { error: String(error) }).catch(() => null);
    }
  }
}

if (process.env.AGENTRL_TASK) {
  const earned = await play(JSON.parse(process.env.AGENTRL_TASK), new OpenAI());
  writeFileSync(process.env.AGENTRL_REWARD_FILE, JSON.stringify(earned));
} else {
  await Promise.all(Array.from({ length: 16 }, () => work(process.env.AGENTRL_URL ?? "http://127.0.0.1:8300")));
}
