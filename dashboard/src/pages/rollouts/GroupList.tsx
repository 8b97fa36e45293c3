import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef } from "react";
import { number } from "../../format";
import { promptLine } from "./conversation";
import { Plain } from "../../text/SafeText";
import { fate, level, type RewardScale } from "./squares";
import type { Group, GroupSample } from "./types";

const ROW = 20;

interface SquaresProps {
  samples: readonly GroupSample[];
  scale: RewardScale;
  selected?: string;
  onSelect?: (sample: string) => void;
}

/** The answers of a group. They shrink until 125 px hold them. */
export function Squares({ samples, scale, selected, onSelect }: SquaresProps) {
  const gap = samples.length > 16 ? 1 : 3;
  const size = Math.max(3, Math.min(13, Math.floor((125 + gap) / Math.max(1, samples.length)) - gap));
  return (
    <span className="sq" style={{ gap }}>
      {samples.map((sample) => {
        const filled = level(sample.reward, scale);
        const name = `${sample.id}, reward ${number(sample.reward)}${sample.status === "kept" ? "" : `, ${sample.status}`}`;
        return (
          <i
            key={sample.id}
            className={`${filled === null ? "none" : `l${filled}`}${sample.id === selected ? " cur" : ""}`}
            style={size < 13 ? { width: size, height: Math.max(size, 8) } : undefined}
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
  group: number | null;
  sample: string;
  onSelect: (sample: string) => void;
}

/** The groups of a step: discarded ones are dim, and say why. */
export function GroupList({ groups, scaleOf, group, sample, onSelect }: GroupListProps) {
  const box = useRef<HTMLDivElement>(null);
  const rows = useVirtualizer({ count: groups.length, getScrollElement: () => box.current, estimateSize: () => ROW, overscan: 12 });
  const at = groups.findIndex((one) => one.id === group);
  useEffect(() => {
    if (at >= 0) rows.scrollToIndex(at, { align: "auto" });
  }, [at]);
  return (
    <div className="gl" ref={box} role="listbox" aria-label="Groups of the step" tabIndex={0}>
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
              title={one.reason ? `${one.status}: ${one.reason}` : (one.status ?? "")}
            >
              <span className="f">{one.id}</span>
              <span className="cut"><Plain text={promptLine(one.prompt)} /></span>
              <Squares samples={one.samples} scale={scale} selected={sample} onSelect={onSelect} />
              <span className="r">{number(one.reward_mean, 2)}</span>
              <span className="s cut">{fate(one, scale)}</span>
            </div>
          );
        })}
      </div>
    </div>
  );
}
