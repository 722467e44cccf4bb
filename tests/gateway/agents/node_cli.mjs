// A coding agent's own command, asked once. CLI: its name.
import { execFileSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const { seed } = JSON.parse(process.env.AGENTRL_TASK);
const [a, b] = [seed % 7, seed % 11];
const question = `What is ${a} + ${b}?`;
const home = join(process.env.TMPDIR, "home");
mkdirSync(join(home, ".codex"), { recursive: true });
const codex = [
  'model = "policy"', 'model_provider = "gateway"', 'web_search = "disabled"',
  "[features]", "multi_agent = false", "apps = false", "goals = false",
  "[model_providers.gateway]", 'name = "gateway"', `base_url = "${process.env.OPENAI_BASE_URL}"`,
  'env_key = "OPENAI_API_KEY"', 'wire_api = "responses"', "supports_websockets = false",
];
writeFileSync(join(home, ".codex", "config.toml"), codex.join("\n"));
const words = {
  claude: ["-p", question, "--dangerously-skip-permissions"],
  codex: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", question],
  qwen: ["-y", "-p", question],
}[process.env.CLI];
const command = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", process.env.CLI);
const env = { ...process.env, HOME: home, PATH: `${dirname(process.execPath)}:${process.env.PATH}` };
const said = execFileSync(command, words, { cwd: home, env, stdio: ["ignore", "pipe", "inherit"] }).toString();
writeFileSync(process.env.AGENTRL_REWARD_FILE, String(Number(said.trim().split(/\s/).at(-1) === String(a + b))));
