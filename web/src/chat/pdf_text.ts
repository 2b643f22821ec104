import { GlobalWorkerOptions, getDocument } from "pdfjs-dist";
import workerUrl from "pdfjs-dist/build/pdf.worker.min.mjs?url";

/** Return the text of a PDF, page by page. It is read in a worker. */
export async function readPdf(bytes: ArrayBuffer): Promise<string> {
  GlobalWorkerOptions.workerSrc = workerUrl;
  const loading = getDocument({ data: bytes, isEvalSupported: false, disableFontFace: true, useSystemFonts: false, useWasm: false, isOffscreenCanvasSupported: false });
  try {
    const pdf = await loading.promise;
    const pages: string[] = [];
    for (let number = 1; number <= pdf.numPages; number++) {
      const page = await pdf.getPage(number);
      const { items } = await page.getTextContent();
      pages.push(items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("").trim());
      page.cleanup();
    }
    return pages.filter(Boolean).join("\n\n");
  } finally {
    await loading.destroy();
  }
}
