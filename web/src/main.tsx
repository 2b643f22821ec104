import { render } from "preact";
import { startApp } from "./app";
import { messageOf } from "./api/errors";
import { Shell } from "./shell";
import "./style/base.css";
import { followTheme } from "./ui/theme";

followTheme();
const root = document.getElementById("app") as HTMLElement;
startApp().then(
  (app) => render(<Shell app={app} />, root),
  (error: unknown) => {
    root.textContent = `This browser does not let the page keep conversations (IndexedDB): ${messageOf(error)}`;
  },
);
