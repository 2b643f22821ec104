/** Move the focus to the composer, as the element that had it is gone. */
export function focusComposer(): void {
  document.querySelector<HTMLElement>(".composer textarea")?.focus();
}

/** Edit the last message of a person. */
export function editLast(): void {
  const buttons = document.querySelectorAll<HTMLElement>(".message.user [aria-label^='Edit']");
  buttons[buttons.length - 1]?.click();
}

/** Make a text area as high as its text; its style sheet has the most. */
export function fitHeight(field: HTMLTextAreaElement): void {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
