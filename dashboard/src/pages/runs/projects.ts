/** The user's choice of W&B projects, which the server follows: the document `projects`. */

export interface Choice {
  added?: string[];
  removed?: string[];
}

const PROJECT = /^(?:https?:\/\/[^/]+\/(?:wandb\/)?([\w.-]+)\/([\w.-]+)(?:[/?#].*)?|([\w.-]+)\/([\w.-]+)(?:\/(?:runs|table|workspace).*)?\/?)$/;

/** Parses ENTITY/PROJECT or the address of a W&B project; null if it is neither. */
export function parseProject(text: string): string | null {
  const match = PROJECT.exec(text.trim());
  return match && `${match[1] ?? match[3]}/${match[2] ?? match[4]}`;
}

const without = (list: string[] | undefined, path: string) => (list ?? []).filter((other) => other !== path);

/** Returns the choice after a project is added or removed. */
export function choose(old: Choice | null, path: string, on: boolean): Choice {
  const added = without(old?.added, path);
  const removed = without(old?.removed, path);
  return { added: on ? [...added, path] : added, removed: on ? removed : [...removed, path] };
}
