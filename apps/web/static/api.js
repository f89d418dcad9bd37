// The server's endpoints, the key, and its errors in words.

import { eventData } from "./sse.js";

const KEY = "edge-spec.key"; // in sessionStorage: forgotten with the tab

/** Takes the key out of `#key=...` and out of the address, so that it is not bookmarked. */
export function takeKeyFromAddress() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  setKey(key);
  history.replaceState(history.state, "", location.pathname + location.search);
}

let currentKey = kept();

export function setKey(key) {
  currentKey = key.trim();
  try {
    sessionStorage.setItem(KEY, currentKey);
  } catch {
    // It holds until the page closes.
  }
}

function kept() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

/** What went wrong, for people: `message` says what, `remedy` what to do, `status` is the HTTP
 * status, 0 where the server did not answer. */
export class ServerError extends Error {
  constructor(status, message, remedy) {
    super(message);
    this.status = status;
    this.remedy = remedy;
  }
}

/** The names of the models that are served. Raises ServerError. */
export async function fetchModels() {
  const { data } = await (await request("v1/models")).json();
  return data.map((model) => model.id);
}

// Of a model, "" being the server's choice. One that was never open is opened first.

/** {model, runtime, drafter, drafters, context_length, version}. Raises ServerError. */
export async function fetchInfo(model = "") {
  return (await request("edge-spec/info" + query(model))).json();
}

/** How a conversation is answered: {default_generation_settings, edge_spec, ...}, in the names of
 * llama.cpp's server. Raises ServerError. */
export async function fetchProps(model) {
  return (await request("props" + query(model))).json();
}

/** The plan, whose `placements` may be missing. Raises ServerError. */
export async function fetchPlan(model) {
  return (await request("edge-spec/plan" + query(model))).json();
}

function query(model) {
  return model === "" ? "" : `?${new URLSearchParams({ model })}`;
}

/**
 * The chunks of a streamed chat completion; `body` is its request.
 * Raises ServerError, also where the stream breaks off; AbortError after signal.abort().
 */
export async function* streamChat(body, signal) {
  const init = { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal };
  const response = await request("v1/chat/completions", init);
  let finished = false;
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") continue; // the end of the stream follows
      const chunk = JSON.parse(data);
      if (chunk.error) throw refused(500, chunk.error);
      finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw broken();
  }
  if (!finished) throw broken();
}

async function request(path, init = {}) {
  const headers = init.body === undefined ? {} : { "Content-Type": "application/json" };
  if (currentKey !== "") headers.Authorization = `Bearer ${currentKey}`;
  let response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const remedy = "Start edge-spec again, then try again.";
    throw new ServerError(0, "The server does not answer.", remedy);
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw refused(response.status, error ?? {}, response.headers.get("Retry-After"));
}

function broken() {
  const remedy = "Check that edge-spec is still running, then try again.";
  return new ServerError(0, "The connection ended before the answer did.", remedy);
}

function refused(status, { message, code }, retryAfter = null) {
  if (status === 401) {
    const remedy = "Enter the one that it was started with.";
    return new ServerError(401, "The server wants a key.", remedy);
  }
  if (/context/.test(code ?? "")) {
    const remedy = "Start a new chat, or edit an earlier message to go on from there.";
    return new ServerError(status, "The conversation no longer fits the model's context.", remedy);
  }
  if (status === 413) {
    return new ServerError(413, "The message is too long for the server.", "Send a shorter one.");
  }
  if (status === 429 || status === 503) {
    const wait = /^\d+$/.test(retryAfter ?? "") ? `Wait ${retryAfter} s` : "Wait a moment";
    return new ServerError(status, message ?? "The server is busy.", `${wait}, then try again.`);
  }
  const what = message ?? `The server answered with status ${status}.`;
  return new ServerError(status, what, status >= 500 ? "Try again." : "");
}
