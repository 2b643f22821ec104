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
