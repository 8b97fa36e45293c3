/** Flattens nested settings into rows: `environments.0.kwargs.max_number`. */

/** Returns the settings inside a value by name, without fields that are not set. */
export function settingRows(name: string, value: unknown): [name: string, value: unknown][] {
  const isList = Array.isArray(value);
  if (isList && value.length === 0) return [[name, null]];
  if (value === null || typeof value !== "object" || (isList && !value.some((one) => one !== null && typeof one === "object"))) return [[name, value]];
  const inside = Object.entries(value).flatMap(([key, one]) => settingRows(`${name}.${key}`, one));
  const set = inside.filter(([, one]) => one !== null && one !== undefined);
  return set.length ? set : [[name, null]];
}

/** Returns the rows of a setting in several runs: those that differ, or all. */
export function comparedRows(name: string, values: unknown[], all = false): [name: string, values: unknown[]][] {
  const runs = values.map((value) => new Map(settingRows(name, value)));
  const names = [...new Set(runs.flatMap((run) => [...run.keys()]))];
  const rows = names.map((one): [string, unknown[]] => [one, runs.map((run) => run.get(one))]);
  const differing = rows.filter(([, own]) => new Set(own.map((value) => JSON.stringify(value ?? null))).size > 1);
  return all ? rows : differing.length ? differing : [[name, values]];
}
