const UNITS = ["B", "KB", "MB", "GB", "TB"];

/** Return a number of bytes as people read it. */
export function shownBytes(bytes: number): string {
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[unit]}`;
}

/** Return seconds as people read them. */
export function shownSeconds(seconds: number): string {
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** Return a rate as people read it. */
export function shownRate(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  return value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}

/** Return a count as people read it. */
export function shownCount(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}
