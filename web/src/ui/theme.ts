import { effect, signal } from "@preact/signals";

export type Theme = "auto" | "light" | "dark";

const NAME = "paceline-theme";
const ORDER: readonly Theme[] = ["auto", "light", "dark"];

/** The colours: as the system has them, or as a person chose. */
export const theme = signal<Theme>(stored());

/** Keep the document in the chosen colours. Call once. */
export function followTheme(): void {
  effect(() => {
    if (theme.value === "auto") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = theme.value;
  });
}

export function nextTheme(): void {
  theme.value = ORDER[(ORDER.indexOf(theme.peek()) + 1) % ORDER.length] as Theme;
  try {
    localStorage.setItem(NAME, theme.peek());
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }
}

function stored(): Theme {
  try {
    const value = localStorage.getItem(NAME);
    return value === "light" || value === "dark" ? value : "auto";
  } catch {
    return "auto";
  }
}
