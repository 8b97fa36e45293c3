/** Nested settings as rows: `environments.0.kwargs.max_number`. */

/** Returns the settings inside of a value by their names. Fields inside of it that are not set are left out. */
export function settingRows(name: string, value: unknown): [name: string, value: unknown][] {
  const isList = Array.isArray(value);
  if (value === null || typeof value !== "object" || (isList && !value.some((one) => one !== null && typeof one === "object"))) return [[name, value]];
  const inside = Object.entries(value).flatMap(([key, one]) => settingRows(`${name}.${key}`, one));
  const set = inside.filter(([, one]) => one !== null && one !== undefined && !(Array.isArray(one) && one.length === 0));
  return set.length ? set : [[name, null]];
}

/** Returns the rows of a setting that differ between two runs. */
export function differingRows(name: string, before: unknown, after: unknown): [name: string, before: unknown, after: unknown][] {
  const [a, b] = [new Map(settingRows(name, before)), new Map(settingRows(name, after))];
  const names = [...new Set([...a.keys(), ...b.keys()])];
  const rows = names.flatMap((one): [string, unknown, unknown][] => (JSON.stringify(a.get(one) ?? null) === JSON.stringify(b.get(one) ?? null) ? [] : [[one, a.get(one), b.get(one)]]));
  return rows.length ? rows : [[name, before, after]];
}
