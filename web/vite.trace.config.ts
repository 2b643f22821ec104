import { type Plugin, defineConfig } from "vite";
import { outDir } from "./vite.config";

const PAGE = `<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>paceline trace</title>
<style>/*style*/</style>
</head>
<body>
<div id="app"></div>
<script type="application/json" id="paceline-trace">null</script>
<script>/*script*/</script>
</body>
</html>
`;

/** Puts script and style into one file, which loads nothing: it is sent around and opened without a server. */
function oneFile(): Plugin {
  return {
    name: "one-file",
    enforce: "post",
    generateBundle(_options, bundle) {
      let script = "";
      let style = "";
      for (const [name, part] of Object.entries(bundle)) {
        if (part.type === "chunk") script += part.code;
        else if (name.endsWith(".css")) style += String(part.source);
        delete bundle[name];
      }
      // Neither may end its element.
      const safeScript = script.replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
      const source = PAGE.replace("/*style*/", () => style.replaceAll("</style", "<\\/style")).replace("/*script*/", () => safeScript);
      this.emitFile({ type: "asset", fileName: "trace.html", source });
    },
  };
}

export default defineConfig({
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  publicDir: false,
  plugins: [oneFile()],
  build: {
    outDir,
    emptyOutDir: false,
    target: "es2022",
    modulePreload: false,
    cssCodeSplit: false,
    rollupOptions: { input: "src/trace.tsx", output: { format: "iife" } },
  },
});
