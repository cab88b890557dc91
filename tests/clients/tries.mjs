// What clients in Node.js are asked to do, as tries.py: `node tries.mjs CLIENT URL`, in the folder that has them.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [client, url] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const load = async (name) => import(require.resolve(name));
const [MODEL, ENCODER, KEY] = ["scripted", "tiny-bert", "none"];
const [ASK, ASK_JSON, TASK] = ["Say hello.", "The weather as JSON.", "Add 2 and 3, then multiply the sum by 4."];
const HELLO = "Hello there.";
const called = [];
const WORK = { add: ({ a, b }) => a + b, multiply: ({ a, b }) => a * b };
const work = (name, given) => { called.push([name, given.a, given.b]); return WORK[name](given); };
const same = (found, wanted) => {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`${JSON.stringify(found)} instead of ${JSON.stringify(wanted)}`);
};
const didTask = (answer) => { same(called, [["add", 2, 3], ["multiply", 5, 4]]); same(answer.includes("20"), true); };
const parameters = {
  type: "object", properties: { a: { type: "integer" }, b: { type: "integer" } }, required: ["a", "b"], additionalProperties: false,
};
const tools = ["add", "multiply"].map((name) => ({ type: "function", function: { name, description: name, strict: true, parameters } }));
const user = (content) => [{ role: "user", content }];

async function vercel(model) {
  const { generateText, generateObject, streamText, tool, stepCountIs } = await load("ai");
  const { z } = await load("zod");
  const numbers = z.object({ a: z.number().int(), b: z.number().int() });
  const set = Object.fromEntries(["add", "multiply"].map((name) => [
    name, tool({ description: name, inputSchema: numbers, execute: async (given) => work(name, given) }),
  ]));
  return {
    chat: async () => same((await generateText({ model, prompt: ASK, maxRetries: 0 })).text, HELLO),
    stream: async () => { let text = ""; for await (const part of streamText({ model, prompt: ASK, maxRetries: 0 }).textStream) text += part; same(text, HELLO); },
    agent: async () => didTask((await generateText({ model, prompt: TASK, tools: set, stopWhen: stepCountIs(4), maxRetries: 0 })).text),
    "structured output": async () => {
      const schema = z.object({ city: z.string(), hot: z.boolean() });
      same((await generateObject({ model, schema, prompt: ASK_JSON, maxRetries: 0 })).object, { city: "Rome", hot: true });
    },
  };
}

const CLIENTS = {
  "openai (node)": ["openai", async () => {
    const OpenAI = (await load("openai")).default;
    const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY, maxRetries: 0 });
    return {
      chat: async () => same((await api.chat.completions.create({ model: MODEL, messages: user(ASK) })).choices[0].message.content, HELLO),
      stream: async () => same((await api.chat.completions.stream({ model: MODEL, messages: user(ASK) }).finalMessage()).content, HELLO),
      tools: async () => {
        const messages = user(TASK);
        for (;;) {
          const { message } = (await api.chat.completions.create({ model: MODEL, messages, tools })).choices[0];
          messages.push(message);
          if (!message.tool_calls?.length) return didTask(message.content);
          for (const call of message.tool_calls) {
            const result = work(call.function.name, JSON.parse(call.function.arguments));
            messages.push({ role: "tool", tool_call_id: call.id, content: String(result) });
          }
        }
      },
      responses: async () => same((await api.responses.create({ model: MODEL, input: ASK })).output_text, HELLO),
      embeddings: async () => same((await api.embeddings.create({ model: ENCODER, input: "ab" })).data[0].embedding.length, 8),
    };
  }],
  "ai, openai-compatible": ["@ai-sdk/openai-compatible", async () => {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return vercel(createOpenAICompatible({ name: "attn", baseURL: `${url}/v1`, supportsStructuredOutputs: true })(MODEL));
  }],
  "ai, openai": ["@ai-sdk/openai", async () => {
    const { createOpenAI } = await load("@ai-sdk/openai");
    return vercel(createOpenAI({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL));
  }],
  "ai, anthropic": ["@ai-sdk/anthropic", async () => {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return vercel(createAnthropic({ baseURL: `${url}/v1`, apiKey: KEY })(MODEL));
  }],
  "ollama (node)": ["ollama", async () => {
    const { Ollama } = await load("ollama");
    const api = new Ollama({ host: url });
    return {
      chat: async () => same((await api.chat({ model: MODEL, messages: user(ASK) })).message.content, HELLO),
      stream: async () => { let text = ""; for await (const part of await api.chat({ model: MODEL, messages: user(ASK), stream: true })) text += part.message.content; same(text, HELLO); },
      models: async () => same((await api.list()).models.map((model) => model.name).sort(), [MODEL, ENCODER]),
    };
  }],
};

const [name, make] = CLIENTS[client];
const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
for (const [feature, run] of Object.entries(await make())) {
  called.length = 0;
  console.log(JSON.stringify({ begins: feature }));
  let why = "";
  try { await run(); } catch (error) { why = String(error).slice(0, 300); console.error(error); }
  console.log(JSON.stringify({ client, package: name, version, feature, why }));
}
