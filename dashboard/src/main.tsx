import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import "./tokens.css";
import "./base.css";
import "./charts/charts.css";
import "./shell/shell.css";
import { App } from "./shell/App";
import { readAhead } from "./state/run";
import { embedded } from "./embedded";
import { routeOf } from "./routes";
import { go, place } from "./state/url";

if (embedded && place().run !== embedded.run) go({ run: embedded.run, page: "overview", params: {} }, true);
const { run, page } = place();
void routeOf(page)?.load();
if (run !== null) readAhead(run);

createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <App />
  </StrictMode>,
);
