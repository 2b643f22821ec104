/** Make a text area as high as its text; its style sheet has the most. */
export function fitHeight(field: HTMLTextAreaElement): void {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
