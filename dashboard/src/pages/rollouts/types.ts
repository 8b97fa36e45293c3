/** Rows of the API by the names that Rollouts uses. */

import type { SampleRow as ListedSample, Samples, Turn } from "../../types";

export type { Group, GroupSample, Sample as Detail, Samples as SamplePage, ToolCall } from "../../types";

/** A sample of a list, or with everything about it. */
export type SampleRow = Omit<ListedSample, "prompt" | "completion" | "snippet"> & { prompt?: string; completion?: string; snippet?: string | null };
export type DetailTurn = Pick<Turn, "turn" | "role" | "text"> & Partial<Turn>;
export type Facets = Samples["facets"];
