// Calls to the server of these pages. The token is kept only in memory, and sent only to this origin, in a header.

let token = "";

export function setToken(given) {
  token = given;
}

export function hasToken() {
  return token !== "";
}

export class CallError extends Error {
  constructor(message, status, code) {
    super(message);
    Object.assign(this, { status, code });
  }
}

async function send(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (token) headers.authorization = `Bearer ${token}`;
  const init = body === undefined ? { headers, signal } : { method: "POST", headers, signal, body: JSON.stringify(body) };
  let answer;
  try {
    answer = await fetch(path, { ...init, credentials: "omit", referrerPolicy: "no-referrer", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallError("The server cannot be reached.", 0, "unreachable");
  }
  if (answer.ok) return answer;
  let failure = { message: `The server responded with status ${answer.status}.` };
  try {
    failure = (await answer.json()).error;
  } catch {
    // The body is not JSON: only the status is reported.
  }
  if (answer.status === 401) document.dispatchEvent(new Event("tokenwanted"));
  throw new CallError(failure.message, answer.status, failure.code);
}

// A POST request with a JSON response.
export async function call(path, body, signal) {
  return (await send(path, body, signal)).json();
}

const rpc = (service, method) => `/attn.v1.${service}/${method}`;

// A gRPC call with a single response.
export function unary(service, method, body = {}, signal = undefined) {
  return call(rpc(service, method), body, signal);
}

// Yields the messages of a gRPC call with a streamed response.
export async function* stream(service, method, body, signal) {
  const answer = await send(rpc(service, method), body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.filter(Boolean)) {
      const message = JSON.parse(line);
      if (message.error) throw new CallError(message.error.message, 200, message.error.code);
      yield message.result;
    }
  }
}

// All items of a paginated list.
export async function all(service, method, name, signal) {
  const found = [];
  let page = "";
  do {
    const answer = await unary(service, method, { page_size: 1000, page_token: page }, signal);
    found.push(...answer[name]);
    page = answer.next_page_token;
  } while (page);
  return found;
}

export async function servingModels(signal) {
  const models = await all("ModelService", "ListModels", "models", signal);
  return models.filter((model) => model.state === "MODEL_STATE_SERVING");
}

// What a page says of a model in its address that is not among those that it can show; null if it is one of them.
export function missingModel(name, names) {
  return name && !names.includes(name) ? `No model ${name} is loaded that this page can show.` : null;
}

// The message of an error for the reader; null for a call that was cancelled on purpose.
export function errorMessage(error) {
  if (error.name === "AbortError") return null;
  if (error.status === 404 && error.message.startsWith("path")) return "This server does not offer that service.";
  return error.message;
}
