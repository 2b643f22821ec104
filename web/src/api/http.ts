import { ApiError, errorOfBody } from "./errors";
import { apiKey, askForKey } from "./key";

/** Return the URL of a route, under whatever prefix the page is served. */
export function urlOf(path: string): string {
  return new URL(path.replace(/^\//, ""), document.baseURI.replace(/[?#].*$/, "")).href;
}

/**
 * Send a request with the key of the session. A 401 asks for a key, as often as it takes; every other status that is no
 * success throws an `ApiError`, and so does a server that is not reached, with status 0.
 */
export async function request(path: string, init: RequestInit = {}): Promise<Response> {
  for (;;) {
    const key = apiKey();
    const response = await sent(path, init, key);
    if (response.status !== 401) {
      if (!response.ok) throw await errorOf(response);
      return response;
    }
    const error = await errorOf(response);
    if (apiKey() !== key) continue; // another request has got one meanwhile
    const reason = key ? "The server does not accept this API key." : "This server asks for an API key.";
    if (!(await askForKey(reason, init.signal))) throw error;
  }
}

/** Send a request and return the JSON of its response. */
export async function requestJson<T>(path: string, init: RequestInit = {}): Promise<T> {
  return (await (await request(path, init)).json()) as T;
}

/** Return the options of a POST with a JSON body. */
export function jsonPost(body: unknown): RequestInit {
  return { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
}

async function sent(path: string, init: RequestInit, key: string): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("authorization", `Bearer ${key}`);
  try {
    return await fetch(urlOf(path), { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.", 0, "unreachable");
  }
}

async function errorOf(response: Response): Promise<ApiError> {
  const seconds = Number.parseFloat(response.headers.get("retry-after") ?? "");
  const retryAfterMs = Number.isFinite(seconds) ? 1000 * seconds : null;
  try {
    return errorOfBody(await response.json(), response.status, retryAfterMs);
  } catch {
    return errorOfBody(null, response.status, retryAfterMs);
  }
}
