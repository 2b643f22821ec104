import { messageOf } from "../api/errors";
import type { ModelFacts } from "../api/types";
import type { Attachment } from "../conversations/model";

const SENT_AS_IT_IS = new Set(["image/png", "image/jpeg"]);
const SOUNDS_SENT_AS_THEY_ARE = new Set(["audio/wav", "audio/x-wav", "audio/wave", "audio/mpeg", "audio/mp3", "audio/flac", "audio/x-flac"]);
const MOST_BYTES = 20 << 20;
const MOST_CHARACTERS = 4_000_000; // of a text file
const MOST_PAGES = 5000; // of a PDF: each takes time, also without text

/** Return files as attachments, in formats that the server reads, and a sentence about each file that cannot be one. */
export async function attachmentsOf(
  files: Iterable<File>,
  model: ModelFacts | null,
  abort: AbortSignal,
): Promise<{ found: Attachment[]; problems: string[] }> {
  const found: Attachment[] = [];
  const problems: string[] = [];
  for (const file of files) {
    try {
      found.push(await attachmentOf(file, model, abort));
    } catch (error) {
      if (!abort.aborted) problems.push(messageOf(error));
    }
    if (abort.aborted) return { found: [], problems: [] };
  }
  return { found, problems };
}

/** Throw if a model takes no files of this kind; the text of a file is taken by each. */
export function checkKind(kind: Attachment["kind"], model: ModelFacts | null): void {
  if (kind === "text" || !model || model.modalities.includes(kind)) return;
  const what = kind === "image" ? "images" : "audio";
  throw new Error(
    `${model.id} takes no ${what}. Choose a model that does, or start the server with the model's multimodal projector (--mmproj).`,
  );
}

async function attachmentOf(file: File, model: ModelFacts | null, abort: AbortSignal): Promise<Attachment> {
  const isDrawing = file.type === "image/svg+xml"; // servers read it as text alone
  const kind = file.type.startsWith("image/") && !isDrawing ? "image" : file.type.startsWith("audio/") ? "audio" : null;
  const name = file.name || (kind ?? "file");
  if (!kind) return { kind: "text", name, text: await readText(file, name, abort) };
  checkKind(kind, model);
  if (file.size > MOST_BYTES) throw new Error(`${name} has more than ${MOST_BYTES >> 20} MB.`);
  try {
    return { kind, name, url: kind === "image" ? await imageUrl(file) : await soundUrl(file) };
  } catch {
    throw new Error(`${name} cannot be read as ${kind === "image" ? "an image" : "audio"}.`);
  }
}

async function readText(file: File, name: string, abort: AbortSignal): Promise<string> {
  if (file.size > MOST_BYTES) throw new Error(`${name} has more than ${MOST_BYTES >> 20} MB.`);
  const bytes = await file.arrayBuffer();
  if (file.type === "application/pdf" || /\.pdf$/i.test(name)) return pdfText(bytes, name, abort);
  const text = textOf(bytes);
  if (text === null) throw new Error(`${name} is neither an image, audio, a PDF nor text.`);
  if (!text.trim()) throw new Error(`${name} is empty.`);
  if (text.length > MOST_CHARACTERS) throw new Error(`${name} has more than ${MOST_CHARACTERS.toLocaleString("en-US")} characters.`);
  return text;
}

/** Return bytes as text in UTF-8; null: they are none. */
export function textOf(bytes: ArrayBuffer): string | null {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

async function pdfText(bytes: ArrayBuffer, name: string, abort: AbortSignal): Promise<string> {
  const { readPdf } = await import("./pdf_text");
  let text: string | null;
  try {
    text = await readPdf(bytes, { characters: MOST_CHARACTERS, pages: MOST_PAGES }, abort);
  } catch (error) {
    if (error instanceof Error && error.name === "PasswordException") throw new Error(`${name} needs a password. Save it without one.`);
    throw new Error(`${name} cannot be read as a PDF.`);
  }
  if (text === null) {
    throw new Error(`${name} has more than ${MOST_CHARACTERS.toLocaleString("en-US")} characters or ${MOST_PAGES.toLocaleString("en-US")} pages.`);
  }
  if (!text.trim()) {
    throw new Error(`${name} has no text that the page can read. Its pages may be pictures, or Chinese, Japanese or Korean without embedded character maps.`);
  }
  return text;
}

async function imageUrl(file: File): Promise<string> {
  const bitmap = await createImageBitmap(file); // also shows that it is an image
  if (SENT_AS_IT_IS.has(file.type)) {
    bitmap.close();
    return dataUrl(file);
  }
  const canvas = document.createElement("canvas");
  canvas.width = bitmap.width;
  canvas.height = bitmap.height;
  canvas.getContext("2d")?.drawImage(bitmap, 0, 0);
  bitmap.close();
  return canvas.toDataURL("image/png");
}

async function soundUrl(file: File): Promise<string> {
  if (SOUNDS_SENT_AS_THEY_ARE.has(file.type)) return dataUrl(file);
  const context = new AudioContext();
  try {
    const sound = await context.decodeAudioData(await file.arrayBuffer());
    return dataUrl(new Blob([wavOf(sound)], { type: "audio/wav" }));
  } finally {
    await context.close();
  }
}

/** Return a sound as a WAV file of one channel with 16 bits. */
export function wavOf(sound: Pick<AudioBuffer, "numberOfChannels" | "sampleRate" | "length" | "getChannelData">): ArrayBuffer {
  const bytes = new ArrayBuffer(44 + 2 * sound.length);
  const view = new DataView(bytes);
  const text = (at: number, value: string): void => {
    for (let index = 0; index < value.length; index++) view.setUint8(at + index, value.charCodeAt(index));
  };
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * sound.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, sound.sampleRate, true);
  view.setUint32(28, 2 * sound.sampleRate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * sound.length, true);
  const channels = Array.from({ length: sound.numberOfChannels }, (_, index) => sound.getChannelData(index));
  for (let at = 0; at < sound.length; at++) {
    const mean = channels.reduce((sum, channel) => sum + (channel[at] ?? 0), 0) / channels.length;
    view.setInt16(44 + 2 * at, Math.round(32767 * Math.max(-1, Math.min(1, mean))), true);
  }
  return bytes;
}

function dataUrl(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result).replace(/^data:audio\/(?:x-wav|wave)/, "data:audio/wav"));
    reader.onerror = () => reject(reader.error ?? new Error("it cannot be read"));
    reader.readAsDataURL(blob);
  });
}
