// The server's API. The key is kept in this module's memory and nowhere else.

let key = "";

export function useKey(value) {
  key = value;
}

/** What went wrong, in words for the reader. status: of HTTP, 0 if there was no answer. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The models that the server names; the first one is used. */
export async function models() {
  const response = await send("GET", "/v1/models");
  return (await response.json()).data;
}

/** The chunks of a streamed answer. Aborting the signal ends the request on the server too. */
export async function* stream(path, body, signal) {
  const response = await send("POST", path, { ...body, stream: true }, signal);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(500, `The answer broke off: ${chunk.error.message}`);
    yield chunk;
  }
  throw new ServerError(0, "The answer broke off: the connection to the server was lost.");
}

async function send(method, path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw new ServerError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  const text = await response.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // an answer of something between this page and the server: its text is all there is
  }
  const starts = { 401: "Not allowed", 429: "The server is busy", 503: "The server takes no requests" };
  const start = starts[response.status] ?? "The server refused this";
  return `${start}: ${message || `status ${response.status}`}`;
}

/** The data of server-sent events; those of this server are one line each. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data: ")) yield line.slice("data: ".length);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The answer broke off: the connection to the server was lost.");
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already, as reported above
  }
}
