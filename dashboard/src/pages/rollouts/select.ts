/** Moves of the selection: keys j k h l. */

import type { Group } from "./types";

export interface Chosen {
  group: number;
  sample: string;
}

const inside = (index: number, length: number) => Math.min(Math.max(index, 0), length - 1);

/** The chosen sample and its group; the first answer of the first group without a valid choice. */
export function chosen(groups: readonly Group[], sample: string): Chosen | null {
  const group = groups.find((one) => one.samples.some((answer) => answer.id === sample)) ?? groups.find((one) => one.samples.length > 0);
  if (!group) return null;
  const found = group.samples.find((answer) => answer.id === sample) ?? group.samples[0]!;
  return { group: group.id, sample: found.id };
}

/** The answer at the same place of the next or previous group. */
export function moveGroup(groups: readonly Group[], sample: string, by: number): string | null {
  const now = chosen(groups, sample);
  if (!now) return null;
  const at = groups.findIndex((group) => group.id === now.group);
  const place = groups[at]!.samples.findIndex((answer) => answer.id === now.sample);
  for (let i = at + by; i >= 0 && i < groups.length; i += by) {
    const answers = groups[i]!.samples;
    if (answers.length > 0) return answers[inside(place, answers.length)]!.id;
  }
  return now.sample;
}

/** The next or previous answer of the group. */
export function moveAnswer(groups: readonly Group[], sample: string, by: number): string | null {
  const now = chosen(groups, sample);
  if (!now) return null;
  const { samples } = groups.find((group) => group.id === now.group)!;
  const at = samples.findIndex((answer) => answer.id === now.sample);
  return samples[inside(at + by, samples.length)]!.id;
}
