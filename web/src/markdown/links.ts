const ALLOWED = new Set(["http:", "https:", "mailto:"]);

/** Return the address of a link of generated text; null: it is no whole address of the web or of mail, and is not linked. */
export function safeAddress(href: string): string | null {
  if (/[\u0000-\u0020\u007f]/.test(href)) return null;
  try {
    const url = new URL(href);
    return ALLOWED.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}
