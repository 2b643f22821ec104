import { signal } from "@preact/signals";
import type { ComponentChildren, VNode } from "preact";
import { useEffect, useRef } from "preact/hooks";

/** A modal dialog. Closing it by Escape calls `onClose`. */
export function Dialog(props: { label: string; onClose: () => void; children: ComponentChildren }): VNode {
  const element = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = element.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  const cancel = (event: Event): void => {
    event.preventDefault();
    props.onClose();
  };
  return (
    <dialog ref={element} aria-label={props.label} onCancel={cancel}>
      {props.children}
    </dialog>
  );
}

interface Question {
  text: string;
  action: string;
  settle: (yes: boolean) => void;
}

const question = signal<Question | null>(null);

/** Ask before something is done that cannot be undone. action: the label of the button. */
export function confirmed(text: string, action: string): Promise<boolean> {
  return new Promise((resolve) => {
    question.value = { text, action, settle: resolve };
  });
}

export function ConfirmDialog(): VNode | null {
  const now = question.value;
  if (!now) return null;
  const settle = (yes: boolean): void => {
    question.value = null;
    now.settle(yes);
  };
  return (
    <Dialog label={now.text} onClose={() => settle(false)}>
      <p>{now.text}</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick={() => settle(false)}>
          Cancel
        </button>
        <button type="button" class="button danger" onClick={() => settle(true)}>
          {now.action}
        </button>
      </div>
    </Dialog>
  );
}
