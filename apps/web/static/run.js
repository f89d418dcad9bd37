// Asks the server for one answer.

import { streamChat } from "./api.js";
import { addChunk, hasText } from "./conversation.js";

/**
 * Streams into `answer` until it is over, however it ends; then its state says how. `changed()` is
 * called after each chunk. Resolves to null, or to the error that ended it.
 */
export async function runAnswer(answer, body, signal, changed) {
  let first_ms = null;
  let last_ms = 0;
  try {
    for await (const chunk of streamChat(body, signal)) {
      const now_ms = performance.now();
      if (hasText(chunk.choices?.[0]?.delta ?? {})) first_ms ??= now_ms; // the prompt has been read
      const elapsed_ms = first_ms === null ? 0 : now_ms - first_ms;
      addChunk(answer, chunk, elapsed_ms, elapsed_ms - last_ms);
      last_ms = elapsed_ms;
      changed();
    }
    if (answer.state === "running") answer.state = "stop";
    return null;
  } catch (error) {
    if (error.name === "AbortError") {
      answer.state = "cancelled";
      return null;
    }
    answer.state = "failed";
    answer.error = { message: error.message, remedy: error.remedy ?? "" };
    return error;
  }
}

/** The request for an answer: of sampling, `settings` that are empty are as the model's makers
 * state, but with temperature 0, which takes the likeliest token. A model that is not known yet is
 * the server's choice: a question may be asked before the server has told. */
export function requestBody(model, messages, drafter, settings, makers) {
  const body = { model: model || undefined, messages, speculative: { drafter, tokens: true } };
  const isGreedy = settings.temperature !== "" && Number(settings.temperature) === 0;
  if (!isGreedy) Object.assign(body, makers);
  for (const name of ["temperature", "top_p", "max_tokens", "reasoning_budget", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  return body;
}
