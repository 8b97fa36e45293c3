import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef } from "react";
import { number } from "../../format";
import { inLine } from "./conversation";
import { Plain } from "../../text/SafeText";
import { visible } from "../../text/hostile";
import { fate, type Filling, level, METRIC, type RewardScale, SQUARES, squareValue } from "./squares";
import type { Group, GroupSample } from "../../types";

const ROW = 20;

const SIDE = 13;
const WIDEST = 125;

const gapOf = (answers: number) => (answers > 16 ? 1 : 3);

/** Returns the width of the squares of `n` answers. */
const squaresWidth = (answers: number) => Math.min(WIDEST, Math.max(1, answers) * (SIDE + gapOf(answers)) - gapOf(answers));

interface SquaresProps {
  samples: readonly GroupSample[];
  environment: string;
  filling: Filling;
  selected?: string;
  onSelect?: (sample: string) => void;
}

/** The answers of a group. They shrink until 125 px hold them. */
export function Squares({ samples, environment, filling, selected, onSelect }: SquaresProps) {
  const gap = gapOf(samples.length);
  const size = Math.max(3, Math.min(SIDE, Math.floor((WIDEST + gap) / Math.max(1, samples.length)) - gap));
  const title = SQUARES.find(([name]) => name === filling.by)?.[1] ?? visible(filling.by.replace(METRIC, ""));
  return (
    <span className="sq" style={{ gap }}>
      {samples.map((sample) => {
        const value = squareValue(sample, filling.by);
        const filled = level(value, filling.scaleOf(environment));
        const name = `${sample.id}, ${title} ${number(value)}${sample.status === "kept" ? "" : `, ${sample.status}`}`;
        return (
          <i
            key={sample.id}
            className={`${filled === null ? "none" : `l${filled}`}${sample.id === selected ? " cur" : ""}`}
            style={size < SIDE ? { width: size, height: Math.max(size, 8) } : undefined}
            title={name}
            onClick={onSelect && ((event) => (event.stopPropagation(), onSelect(sample.id)))}
          />
        );
      })}
    </span>
  );
}

interface GroupListProps {
  groups: readonly Group[];
  scaleOf: (environment: string) => RewardScale;
  filling?: Filling;
  group: number | null;
  sample: string;
  onSelect: (sample: string) => void;
}

/** The groups of a step: discarded ones are dim, and say why. */
export function GroupList({ groups, scaleOf, filling = { by: "reward", scaleOf }, group, sample, onSelect }: GroupListProps) {
  const box = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer({ count: groups.length, getScrollElement: () => box.current, estimateSize: () => ROW, overscan: 12 });
  const at = groups.findIndex((one) => one.id === group);
  useEffect(() => {
    if (at >= 0) rows.scrollToIndex(at, { align: "auto" });
  }, [at]);
  const most = groups.reduce((widest, one) => Math.max(widest, one.samples.length), 0);
  return (
    <div className="gl" ref={box} role="listbox" aria-label="Groups of the step" tabIndex={0} style={{ "--sq": `${squaresWidth(most)}px` } as React.CSSProperties}>
      <div style={{ height: rows.getTotalSize(), position: "relative" }}>
        {rows.getVirtualItems().map(({ index, start }) => {
          const one = groups[index]!;
          const scale = scaleOf(one.environment ?? "");
          const first = one.samples[0]?.id;
          return (
            <div
              key={`${one.attempt}/${one.id}`}
              role="option"
              aria-selected={one.id === group}
              className={`gr${one.id === group ? " sel" : ""}${one.status === "kept" ? "" : " x"}`}
              style={{ transform: `translateY(${start}px)` }}
              onClick={() => first && onSelect(one.samples.some((answer) => answer.id === sample) ? sample : first)}
              title={visible(one.reason ? `${one.status}: ${one.reason}` : (one.status ?? ""))}
            >
              <span className="f">{one.id}</span>
              <span className="cut" title={visible(inLine(one.prompt))}><Plain text={inLine(one.prompt)} /></span>
              <Squares samples={one.samples} environment={one.environment ?? ""} filling={filling} selected={sample} onSelect={onSelect} />
              <span className="r">{number(one.reward_mean, 2)}</span>
              <span className="s cut">{fate(one, scale)}</span>
            </div>
          );
        })}
      </div>
    </div>
  );
}
