import { defineConfig } from "vitest/config";

const server = process.env["PACELINE_URL"] ?? "http://127.0.0.1:8080";
const routes = ["/v1", "/tokenize", "/docs", "/props", "/models", "/health", "/openapi.json", "/metrics", "/slots"];

/** Where the built page goes; docs/reference/engine_events.md has what is in it. */
export const outDir = process.env["PACELINE_WEB_OUT"] ?? "../src/paceline/webui";

export default defineConfig({
  base: "./", // the page works under any prefix
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  build: {
    outDir,
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false, // one script, and libraries that are loaded when a reply needs them
    cssCodeSplit: false,
    assetsInlineLimit: 0, // the policy of the page allows no inline code
    reportCompressedSize: true,
  },
  server: { proxy: Object.fromEntries(routes.map((route) => [route, { target: server, changeOrigin: true }])) },
  test: { environment: "jsdom", include: ["tests/**/*.test.{ts,tsx}"] },
});
