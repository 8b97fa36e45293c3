/** The frame of every page: header, ruler of steps, palette, keys. */

import { Component, type ReactNode, Suspense, useEffect, useState } from "react";
import { ApiError } from "../api";
import { embedded } from "../embedded";
import { ROUTES, routeOf } from "../routes";
import { useConnection, useEvents, useRefusal, useRemote } from "../state/live";
import { useRunInfo } from "../state/run";
import { useTheme } from "../state/theme";
import { elsewhere, go, usePlace } from "../state/url";
import { CompareDialog } from "./CompareDialog";
import { Header } from "./Header";
import { KeysDialog, startKeys, useKeys } from "./keys";
import { NoteDialog } from "./NoteDialog";
import { type Opened, Palette } from "./Palette";
import { Failure, Quiet } from "./Quiet";
import { Ruler } from "./Ruler";
import { RecordStrip, RemoteStrip, remoteWords } from "./Strips";
import { visible } from "../text/hostile";

export function App() {
  const place = usePlace();
  useTheme();
  useEvents(place.run === null ? [] : [place.run]);
  const route = routeOf(place.page);
  const info = useRunInfo(place.run);
  const newest = useRemote(place.run);
  const { connected } = useConnection(place.run);
  const refusal = useRefusal();
  const remote = newest.remote ?? info.data?.info.remote ?? null;
  const isMissing = route?.ofRun === true && remote !== null && remote.phase !== "synced" && !newest.hasSteps;
  const isGone = info.data !== undefined && info.error instanceof ApiError && info.error.status === 404;
  const isShown = place.run !== null && info.data !== undefined && !isGone;
  const [opened, open] = useState<Opened>(null);
  useEffect(startKeys, []);
  useKeys("Everywhere", [
    { keys: ["Control+k", "Meta+k"], does: "search pages, runs, steps, metrics, settings", run: () => open("palette") },
    { keys: ["?"], does: "this list", run: () => open("keys") },
    { keys: ["/"], does: "search on this page, or everything", run: () => focusSearch() || open("palette") },
    ...ROUTES.filter((other) => !other.ofRun || place.run !== null).map((other) => ({
      keys: [`g ${other.key}`],
      does: other.title,
      run: () => {
        if (!other.ofRun) go(elsewhere(place, { run: null, page: other.page }));
        else go(elsewhere(place, { page: other.page }));
      },
    })),
  ]);
  useEffect(() => {
    const name = visible(info.data?.info.name ?? "");
    document.title = [name, route?.title, "Telescope"].filter(Boolean).join(" · ");
  }, [info.data?.info.name, route?.title]);

  return (
    <>
      <a className="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the page
      </a>
      <Header open={open} />
      {remote && !isMissing && <RemoteStrip remote={remote} />}
      {isShown && !isMissing && <RecordStrip run={place.run!} page={place.page} />}
      {isShown && !isMissing && <Ruler />}
      <main className="page" id="main" tabIndex={-1}>
        <Boundary key={`${place.run}/${place.page}`}>{content()}</Boundary>
      </main>
      {opened === "palette" && <Palette close={() => open(null)} openOther={open} />}
      {opened === "keys" && <KeysDialog close={() => open(null)} />}
      {isShown && !embedded && <NoteDialog run={place.run!} />}
      {opened === "compare" && <CompareDialog close={() => open(null)} />}
    </>
  );

  function content(): ReactNode {
    if (!route)
      return <Quiet title="There is no such page." text={embedded ? "A run in one file has some of the dashboard's pages." : `The address names the page "${place.page}".`} />;
    if (route.ofRun && place.run === null) return <Quiet title="Choose a run first." text="This page belongs to a run." />;
    if (place.run !== null && info.error && !isShown) return <Failure error={info.error} wasThere={isGone} />;
    if (remote && isMissing) {
      const failed = remote.phase === "failed";
      return <Quiet title={failed ? "This run could not be copied." : "This run is being copied."} text={remoteWords(remote)} />;
    }
    const Page = route.component;
    return (
      <Suspense fallback={connected === false ? <Quiet title={refusal ? "The server refuses this page." : "The server did not answer."} text={refusal ?? "This page opens when it does."} /> : null}>
        <Page />
      </Suspense>
    );
  }
}

function focusSearch(): boolean {
  const field = document.querySelector<HTMLInputElement>('main input[type="search"]');
  field?.focus();
  field?.select();
  return field !== null;
}

class Boundary extends Component<{ children: ReactNode }, { error: Error | null }> {
  state = { error: null as Error | null };
  static getDerivedStateFromError(error: Error) {
    return { error };
  }
  render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    return (
      <Quiet title="This page failed." text={error.message}>
        <pre>{error.stack}</pre>
        <p>
          <button className="link" onClick={() => this.setState({ error: null })}>
            Try again
          </button>
        </p>
      </Quiet>
    );
  }
}
