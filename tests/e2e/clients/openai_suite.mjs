// OpenAI's TypeScript client, as its users use it: `node --test openai_suite.mjs`, with the folder
// that has the package in EDGE_SPEC_NODE_CLIENTS and the server's address in EDGE_SPEC_URL.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import test from "node:test";
import { pathToFileURL } from "node:url";

const { resolve } = createRequire(join(process.env.EDGE_SPEC_NODE_CLIENTS, "package.json"));
const { OpenAI, BadRequestError, NotFoundError } = await import(pathToFileURL(resolve("openai")));
const client = new OpenAI({ baseURL: process.env.EDGE_SPEC_URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Write a long story about the sea." }];
const asked = { model: "smollm2", messages, temperature: 0, max_tokens: 24 };
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "Tells the weather of a city",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};

async function joined(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

test("lists models and finds one", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes("smollm2"), names.join());
  assert.equal((await client.models.retrieve("smollm2")).object, "model");
});

test("answers whole and in a stream", async () => {
  const whole = await client.chat.completions.create(asked);
  assert.ok(whole.choices[0].message.content);
  assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
  const stream = await client.chat.completions.create({ ...asked, stream: true });
  assert.equal(await joined(stream), whole.choices[0].message.content);
});

test("accumulates a stream with its usage", async () => {
  const stream = client.chat.completions.stream({
    ...asked,
    stream_options: { include_usage: true },
  });
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  const final = await stream.finalChatCompletion();
  assert.equal(deltas.join(""), final.choices[0].message.content);
  assert.equal(final.choices[0].finish_reason, "length");
  assert.equal((await stream.totalUsage()).completion_tokens, 24);
});

test("ends a stream early, and the next answer comes", async () => {
  const stream = await client.chat.completions.create({ ...asked, max_tokens: 400, stream: true });
  for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
  assert.ok(stream.controller.signal.aborted);
  assert.ok((await client.chat.completions.create(asked)).choices[0].message.content);
});

test("gives up where it is told to", async () => {
  const signal = AbortSignal.abort();
  await assert.rejects(client.chat.completions.create(asked, { signal }), OpenAI.APIUserAbortError);
});

test("calls tools whole, in a stream, and by its runner", async () => {
  const tools = { ...asked, max_tokens: 60, tools: [weather], tool_choice: "required" };
  const [call] = (await client.chat.completions.create(tools)).choices[0].message.tool_calls;
  assert.equal(call.function.name, "weather");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.function.arguments).city));
  const stream = client.chat.completions.stream(tools);
  const [streamed] = (await stream.finalChatCompletion()).choices[0].message.tool_calls;
  assert.deepEqual(streamed.function.arguments, call.function.arguments);
  const cities = [];
  const runner = client.chat.completions.runTools({
    ...asked,
    tools: [
      {
        ...weather,
        function: {
          ...weather.function,
          parse: JSON.parse,
          function: ({ city }) => `${cities.push(city)} degrees`,
        },
      },
    ],
    tool_choice: { type: "function", function: { name: "weather" } },
  });
  await runner.done();
  assert.equal(cities.length, 1);
});

test("reads a form", async () => {
  const schema = {
    type: "object",
    properties: { age: { type: "integer" }, tall: { type: "boolean" } },
    required: ["age", "tall"],
    additionalProperties: false,
  };
  const answer = await client.chat.completions.parse({
    ...asked,
    max_tokens: 60,
    response_format: { type: "json_schema", json_schema: { name: "person", strict: true, schema } },
  });
  const { age, tall } = JSON.parse(answer.choices[0].message.content);
  assert.ok(Number.isInteger(age) && typeof tall === "boolean");
});

test("tells log probabilities and several choices", async () => {
  const answer = await client.chat.completions.create({
    ...asked, max_tokens: 5, n: 2, logprobs: true, top_logprobs: 2,
  });
  assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
  for (const { logprobs } of answer.choices) assert.equal(logprobs.content[0].top_logprobs.length, 2);
});

test("predicts an output, and is told what of it came true", async () => {
  const { choices } = await client.chat.completions.create(asked);
  const prediction = { type: "content", content: choices[0].message.content };
  const answer = await client.chat.completions.create({ ...asked, prediction });
  assert.equal(answer.choices[0].message.content, prediction.content);
  const details = answer.usage.completion_tokens_details;
  assert.ok(details.accepted_prediction_tokens > 0);
});

test("continues a text, whole and in a stream", async () => {
  const prompted = { model: "smollm2", prompt: "Once upon a time", max_tokens: 12, temperature: 0 };
  const whole = await client.completions.create(prompted);
  let text = "";
  for await (const chunk of await client.completions.create({ ...prompted, stream: true }))
    text += chunk.choices[0]?.text ?? "";
  assert.ok(text);
  assert.equal(text, whole.choices[0].text);
});

test("raises errors of its own kinds", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, model: "none" }), (error) => {
    assert.ok(error instanceof NotFoundError);
    assert.equal(error.code, "model_not_found");
    return true;
  });
  await assert.rejects(client.chat.completions.create({ ...asked, top_p: 7 }), (error) => {
    assert.ok(error instanceof BadRequestError);
    assert.equal(error.param, "top_p");
    return true;
  });
  await assert.rejects(client.embeddings.create({ model: "smollm2", input: "a" }), NotFoundError);
});

test("a response streams the text that it has whole", async () => {
  const input = messages[0].content;
  const body = { model: "smollm2", input, temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(body);
  const stream = client.responses.stream(body);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const last = await stream.finalResponse();
  assert.equal(text, whole.output_text);
  assert.equal(last.output_text, whole.output_text);
});

test("a response calls a tool and goes on with its output", async () => {
  const tools = [{ type: "function", ...weather.function, strict: true }];
  const input = [{ role: "user", content: "What is the weather in Oslo?" }];
  const asked = { model: "smollm2", tools, temperature: 0, max_output_tokens: 64 };
  const called = await client.responses.create({ ...asked, input, tool_choice: "required" });
  const [call] = called.output;
  assert.equal(call.type, "function_call");
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(call.arguments).city));
  const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  const answer = await client.responses.create({ ...asked, input: [...input, call, output] });
  assert.ok(answer.output.length);
});
