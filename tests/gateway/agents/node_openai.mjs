// The loop that people write around npm's openai: tools until the model answers.
import { writeFileSync } from "node:fs";
import OpenAI from "openai";

const task = JSON.parse(process.env.AGENTRL_TASK);
const [a, b] = [task.seed % 7, task.seed % 11];
const tools = [{ type: "function", function: { name: "add", description: "Add two numbers.", parameters: {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"] } } }];
const messages = [{ role: "user", content: `What is ${a} + ${b}?` }];
const client = new OpenAI();
let answer;
for (let turn = 0; turn < 4; turn++) {
  const stream = client.chat.completions.stream({ model: "policy", messages, tools });
  answer = (await stream.finalChatCompletion()).choices[0].message;
  messages.push(answer);
  if (!answer.tool_calls?.length) break;
  for (const call of answer.tool_calls) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a + b) });
  }
}
writeFileSync(process.env.AGENTRL_REWARD_FILE, JSON.stringify({ reward: Number(answer.content === String(a + b)) }));
