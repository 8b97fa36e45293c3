import { runPath } from "../../api";
import { count, number } from "../../format";
import { useResource } from "../../state/resource";
import type { SandboxTimes, Value } from "../../types";
import { visible } from "../../text/hostile";

/** How long creating sandboxes, using them and waiting for them took. */
export function Sandboxes({ run, span, version }: { run: string; span: { start: Value; end: Value }; version: string }) {
  const times = useResource<SandboxTimes[]>(runPath(run, "sandboxes"), span, version).data ?? [];
  if (times.length === 0) return null;
  return (
    <table className="sbx" aria-label="Times of sandbox operations">
      <thead>
        <tr><th>Operation</th><th className="r">calls</th><th className="r">p50</th><th className="r">p95</th></tr>
      </thead>
      <tbody>
        {times.map((row) => (
          <tr key={row.name}>
            <td>{visible(row.name)}</td>
            <td className="r">{count(row.count)}</td>
            <td className="r">{number(row.p50, 3)} s</td>
            <td className="r">{number(row.p95, 3)} s</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
