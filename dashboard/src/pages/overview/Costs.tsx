/** Shows where the GPU hours went: a bar for tokens, for engines and for the trainer, with costs if there is a price. */

import { runPath } from "../../api";
import { number, percent } from "../../format";
import { useDocument } from "../../state/documents";
import { useVersion } from "../../state/live";
import { useResource } from "../../state/resource";
import { useThrottled } from "../../state/timing";
import { useParam } from "../../state/url";
import type { Costs as Found } from "../../types";
import { type Bar, barsOf, priceOf } from "./costs";

/** Shortest time between two reads of a live run. Each read sums all samples. */
const COUNT_MS = 10_000;
/** Smaller shares have no label under a bar. */
const LEAST_SHARE = 0.005;

export function Costs({ run }: { run: string }) {
  const { data } = useResource<Found>(runPath(run, "costs"), {}, useThrottled(useVersion(run, "steps"), COUNT_MS));
  const kept = useDocument<{ price?: string }>("costs");
  const [inAddress, setInAddress] = useParam("price");
  const text = inAddress || (kept.value?.price ?? "");
  const price = priceOf(text);
  if (!data) return null;
  const bars = barsOf(data);
  if (bars.length === 0) return null;
  const unit = data.unit === "GPU" ? "GPU" : "process";
  const hours = bars.filter((bar) => bar.unit === "hours").reduce((sum, bar) => sum + bar.total, 0);
  return (
    <section className="costs" aria-label={`Where the ${unit} hours went`}>
      <h2>
        Where the {unit} hours went
        <span>
          {number(hours)} h{price === null ? "" : `, ${number(hours * price, 2)}`}
          <label>
            {" "}
            at{" "}
            <input
              className="field"
              inputMode="decimal"
              value={text}
              placeholder="price"
              aria-label={`Price of a ${unit} hour`}
              onChange={(event) => {
                setInAddress(null, true);
                const next = event.target.value;
                kept.change(() => (next ? { price: next } : null));
              }}
            />{" "}
            an hour
          </label>
        </span>
      </h2>
      <div className="bars">
        {bars.map((bar) => (
          <Row key={bar.title} bar={bar} price={price} />
        ))}
      </div>
    </section>
  );
}

function Row({ bar, price }: { bar: Bar; price: number | null }) {
  const write = (value: number) => (bar.unit === "tokens" ? `${number(value)} tokens` : `${number(value)} h${price === null ? "" : `, ${number(value * price, 2)}`}`);
  return (
    <div className="cost">
      <p>
        <span className="d">{bar.title}</span> <span className="f">{write(bar.total)}</span>
      </p>
      <div className="bar2" role="img" aria-label={bar.parts.map((part) => `${part.name} ${percent(part.value / bar.total, 0)}`).join(", ")}>
        {bar.parts.map((part) => (
          <i key={part.name} title={`${part.name}: ${part.title}, ${write(part.value)}, ${percent(part.value / bar.total)}`} style={{ width: `${(100 * part.value) / bar.total}%`, background: `var(${part.color})` }} />
        ))}
      </div>
      <p className="s d legend">
        {bar.parts
          .filter((part) => part.value / bar.total >= LEAST_SHARE)
          .map((part) => (
            <span key={part.name} title={`${part.title}: ${write(part.value)}`}>
              <i className="dot small" style={{ background: `var(${part.color})` }} />
              {part.name} {percent(part.value / bar.total, 0)}
            </span>
          ))}
      </p>
    </div>
  );
}
