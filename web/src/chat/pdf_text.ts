import { GlobalWorkerOptions, getDocument } from "pdfjs-dist";
import type { TextContent } from "pdfjs-dist/types/src/display/api";
import workerUrl from "pdfjs-dist/build/pdf.worker.min.mjs?url";

/** Return the text of a PDF, page by page; null: it has more characters or pages than allowed. It is read in a worker. */
export async function readPdf(bytes: ArrayBuffer, most: { characters: number; pages: number }, abort: AbortSignal): Promise<string | null> {
  abort.throwIfAborted();
  GlobalWorkerOptions.workerSrc = workerUrl;
  const loading = getDocument({
    data: bytes, disableFontFace: true, isEvalSupported: false, isOffscreenCanvasSupported: false, useSystemFonts: false, useWasm: false,
  }); // prettier-ignore
  const end = (): void => void loading.destroy(); // the pending step fails
  abort.addEventListener("abort", end);
  try {
    const pdf = await loading.promise;
    if (pdf.numPages > most.pages) return null;
    const pages: string[] = [];
    let left = most.characters;
    for (let number = 1; number <= pdf.numPages; number++) {
      const page = await pdf.getPage(number);
      const parts: string[] = [];
      const reader = (page.streamTextContent() as ReadableStream<TextContent>).getReader();
      for (let step = await reader.read(); !step.done; step = await reader.read()) {
        abort.throwIfAborted();
        const part = step.value.items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("");
        left -= part.length;
        if (left < 0) return null;
        parts.push(part);
      }
      pages.push(parts.join("").trim());
      page.cleanup();
    }
    return pages.filter(Boolean).join("\n\n");
  } finally {
    abort.removeEventListener("abort", end);
    await loading.destroy();
  }
}
