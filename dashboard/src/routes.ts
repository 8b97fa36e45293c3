/** Every page, in the order of the header. A page that is not in this table does not exist. */

import { loaded } from "./api";
import { embedded } from "./embedded";
import { type ComponentType, lazy, type LazyExoticComponent } from "react";

interface Route {
  /** The name in the address. */
  page: string;
  title: string;
  /** Pressed after `g`. */
  key: string;
  /** Pages of all runs stand outside a run's address. */
  ofRun: boolean;
  /** Left out of the header; the palette and links lead there. */
  hidden?: boolean;
  /** Whether a run in one HTML file has it, or only such a file. */
  inFile?: boolean | "only";
  component: LazyExoticComponent<ComponentType>;
  /** Starts to load the code of the page. */
  load: () => Promise<unknown>;
}

const page = (load: () => Promise<Record<string, unknown>>, name: string) => ({
  load: () => load().catch(() => {}), // the component tries again, and says what failed
  component: lazy(async () => ({ default: (await loaded(load))[name] as ComponentType })),
});

const ALL: Route[] = [
  { page: "runs", title: "Runs", key: "r", ofRun: false, ...page(() => import("./pages/runs/Runs"), "Runs") },
  { page: "overview", inFile: true, title: "Overview", key: "o", ofRun: true, ...page(() => import("./pages/overview/Overview"), "Overview") },
  { page: "metrics", inFile: true, title: "Metrics", key: "m", ofRun: true, ...page(() => import("./pages/metrics/Metrics"), "Metrics") },
  { page: "rollouts", title: "Rollouts", key: "s", ofRun: true, ...page(() => import("./pages/rollouts/Rollouts"), "Rollouts") },
  { page: "answers", inFile: "only", title: "Answers", key: "a", ofRun: true, ...page(() => import("./pages/report/Answers"), "Answers") },
  { page: "timeline", title: "Timeline", key: "t", ofRun: true, ...page(() => import("./pages/timeline/Timeline"), "Timeline") },
  { page: "infra", title: "Infra", key: "i", ofRun: true, ...page(() => import("./pages/infra/Infra"), "Infra") },
  { page: "evals", inFile: true, title: "Evals", key: "e", ofRun: true, ...page(() => import("./pages/evals/Evals"), "Evals") },
  { page: "logs", title: "Logs", key: "l", ofRun: true, ...page(() => import("./pages/logs/Logs"), "Logs") },
  { page: "code", inFile: true, title: "Code", key: "c", ofRun: true, hidden: true, ...page(() => import("./pages/code/Code"), "Code") },
  { page: "changes", title: "What changed at a step", key: "w", ofRun: true, hidden: true, ...page(() => import("./pages/changes/Changes"), "Changes") },
  { page: "compare", title: "Compare config and code", key: "d", ofRun: true, hidden: true, ...page(() => import("./pages/compare/Compare"), "Compare") },
];

export const ROUTES = ALL.filter((route) => (embedded ? route.inFile : route.inFile !== "only"));

export const routeOf = (name: string): Route | undefined => ROUTES.find((route) => route.page === name);
