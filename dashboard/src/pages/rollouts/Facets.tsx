import { count } from "../../format";
import { setParams, usePlace } from "../../state/url";
import type { Facets as Counts } from "./types";

/** Facets that the server filters by: the parameter of the address has its name. */
const FACETS: [name: string, title: string][] = [
  ["status", "Status"],
  ["environment", "Environment"],
  ["reward", "Reward"],
  ["age", "Age"],
  ["stop_reason", "Stop"],
  ["eval_name", "Eval"],
];

const values = (text: string | undefined) => (text ?? "").split(",").filter(Boolean);

/** Chosen values of every facet that is in the address. */
export function chosenFacets(params: Record<string, string>): Record<string, string> {
  return Object.fromEntries(FACETS.map(([name]) => [name, params[name] ?? ""]).filter(([, value]) => value));
}

/** Counts for the current search. A click filters; a facet with nothing stays, dim. */
export function Facets({ counts, total }: { counts: Counts; total: number }) {
  const { params } = usePlace();
  return FACETS.map(([name, title]) => {
    const entries = counts[name];
    if (!entries || entries.length === 0 || (entries.length === 1 && name !== "status" && !params[name])) return null;
    const chosen = values(params[name]);
    return (
      <dl key={name}>
        <dt>{title}</dt>
        {entries.slice(0, 8).map((entry) => {
          const on = chosen.length === 0 || chosen.includes(entry.value);
          const toggle = () => {
            const next = chosen.includes(entry.value) ? chosen.filter((value) => value !== entry.value) : [...chosen, entry.value];
            setParams({ [name]: next.join(","), list: "answers" });
          };
          return (
            <dd key={entry.value} style={{ "--s": total ? entry.count / total : 0 } as React.CSSProperties}>
              <button role="checkbox" aria-checked={chosen.includes(entry.value)} className={`${on ? "" : "off"} ${entry.count ? "" : "zero"}`} onClick={toggle}>
                {entry.value}
                <b>{count(entry.count)}</b>
              </button>
            </dd>
          );
        })}
      </dl>
    );
  });
}
