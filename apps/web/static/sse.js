// Server-sent events out of the body of a fetch, which EventSource cannot do for a POST.

/**
 * The `data` of each event, in order, until the stream ends; comments and other fields are passed
 * over. `body` is a ReadableStream of bytes. Aborting the fetch raises AbortError here.
 */
export async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length > 0) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    // Left early: the connection closes, and the server stops writing.
    reader.cancel().catch(() => {});
  }
}
