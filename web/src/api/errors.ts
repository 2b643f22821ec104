/** The error of a request, in the words of the server. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string = "",
    readonly param: string = "",
    /** The time after which the server invites another try; null: it does not. */
    readonly retryAfterMs: number | null = null,
  ) {
    super(message);
    this.name = "ApiError";
  }

  /** Whether the same request may succeed later: the server is loading, full, or not there. */
  get isTemporary(): boolean {
    return [0, 429, 502, 503, 504].includes(this.status);
  }
}

interface ErrorBody {
  message?: unknown;
  code?: unknown;
  param?: unknown;
}

/** Parse an error of any of the server's shapes; other bodies become a sentence about the status. */
export function errorOfBody(body: unknown, status: number, retryAfterMs: number | null = null): ApiError {
  const inner = typeof body === "object" && body !== null ? (body as { error?: unknown }).error : undefined;
  if (typeof inner === "string") return new ApiError(inner, status, "", "", retryAfterMs);
  if (typeof inner === "object" && inner !== null) {
    const { message, code, param } = inner as ErrorBody;
    return new ApiError(
      typeof message === "string" && message ? message : `The server returned status ${status}.`,
      status,
      code === undefined || code === null ? "" : String(code),
      typeof param === "string" ? param : "",
      retryAfterMs,
    );
  }
  return new ApiError(`The server returned status ${status}.`, status, "", "", retryAfterMs);
}

/** Return an error as a sentence for people. */
export function messageOf(error: unknown): string {
  if (error instanceof ApiError && error.param) return `${error.message} (${error.param})`;
  return error instanceof Error ? error.message : String(error);
}
