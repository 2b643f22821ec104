import { options, render } from "preact";
import { startApp } from "./app";
import { messageOf } from "./api/errors";
import { Shell } from "./shell";
import "./style/base.css";
import { followTheme } from "./ui/theme";

// A stream changes the page hundreds of times a second; it is drawn once a frame, and now and then in a hidden tab.
options.debounceRendering = (draw) => {
  if (document.hidden) setTimeout(draw, 100);
  else requestAnimationFrame(draw);
};

followTheme();
const root = document.getElementById("app") as HTMLElement;
startApp().then(
  (app) => render(<Shell app={app} />, root),
  (error: unknown) => {
    root.textContent = `This browser does not let the page keep conversations (IndexedDB): ${messageOf(error)}`;
  },
);
