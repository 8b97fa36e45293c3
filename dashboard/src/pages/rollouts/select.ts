/** The selection: addresses of an answer and of its time, and moves by the keys j k h l. */

import { neighbor } from "../../lists";
import { elsewhere, format, type Place } from "../../state/url";
import type { Group, Sample } from "../../types";

type Named = Pick<Sample, "attempt" | "sample_id" | "step" | "eval_name">;

/** Steps of the ruler begin at 0; an eval before training has step -1. */
const stepParam = (step: number | null): string => (step === null || step < 0 ? "" : String(step));

/** Returns the address of an answer. Those of evals have no groups: they open in the list of all steps. */
export function answerAddress(place: Place, { attempt, sample_id, step, eval_name }: Named): string {
  const list: Record<string, string> = eval_name ? { list: "answers", status: "eval", eval_name } : {};
  return format(elsewhere(place, { page: "rollouts" }, { range: "", step: stepParam(step), attempt: String(attempt), sample: sample_id, ...list }));
}

/** Seconds around a request that the timeline shows, as a share of the request, and at least. */
const AROUND = 0.6;
const LEAST_AROUND = 0.05;

/** Returns the address of an answer's time on the timeline, which counts from `origin`. An answer can lie before the step that trained it. */
export function timeAddress(place: Place, { attempt, sample_id, step }: Named, start: number, end: number, origin: number): string {
  const around = Math.max(LEAST_AROUND, AROUND * (end - start));
  const t = `${(start - around - origin).toFixed(4)}-${(end + around - origin).toFixed(4)}`;
  return format(elsewhere(place, { page: "timeline" }, { range: "", step: stepParam(step), attempt: String(attempt), sample: sample_id, t }));
}

export interface Chosen {
  group: number;
  sample: string;
}

/** The named sample and its group, null if no group has it; without a name the first answer of the first group. */
export function chosen(groups: readonly Group[], sample: string): Chosen | null {
  const group = sample ? groups.find((one) => one.samples.some((answer) => answer.id === sample)) : groups.find((one) => one.samples.length > 0);
  return group ? { group: group.id, sample: sample || group.samples[0]!.id } : null;
}

const firstOf = (groups: readonly Group[]): string | null => chosen(groups, "")?.sample ?? null;

/** The answer at the same place of the next or previous group. */
export function moveGroup(groups: readonly Group[], sample: string, by: number): string | null {
  const now = chosen(groups, sample);
  if (!now) return firstOf(groups);
  const at = groups.findIndex((group) => group.id === now.group);
  const place = groups[at]!.samples.findIndex((answer) => answer.id === now.sample);
  for (let i = at + by; i >= 0 && i < groups.length; i += by) {
    const answer = neighbor(groups[i]!.samples, place, 0);
    if (answer) return answer.id;
  }
  return now.sample;
}

/** The next or previous answer of the group. */
export function moveAnswer(groups: readonly Group[], sample: string, by: number): string | null {
  const now = chosen(groups, sample);
  if (!now) return firstOf(groups);
  const { samples } = groups.find((group) => group.id === now.group)!;
  return neighbor(samples, samples.findIndex((answer) => answer.id === now.sample), by)!.id;
}
