/** Move the focus to the composer, as the element that had it is gone. */
export function focusComposer(): void {
  document.querySelector<HTMLElement>(".composer textarea")?.focus();
}

/** Make a text area as high as its text; its style sheet has the most. */
export function fitHeight(field: HTMLTextAreaElement): void {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
