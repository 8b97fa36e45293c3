/** The user's choice of W&B projects, which the server follows: the document `projects`. */

export interface Choice {
  added?: string[];
  removed?: string[];
}

const PROJECT = /^(?:https?:\/\/[^/]+\/(?:wandb\/)?)?([\w.-]+)\/([\w.-]+)(?:\/(?:runs|table|workspace).*)?\/?$/;

/** Returns ENTITY/PROJECT of a name or an address of W&B, or null. */
export function parseProject(text: string): string | null {
  const match = PROJECT.exec(text.trim());
  return match && `${match[1]}/${match[2]}`;
}

const without = (list: string[] | undefined, path: string) => (list ?? []).filter((other) => other !== path);

/** Returns the choice with a project that is shown, or not. */
export function choose(old: Choice | null, path: string, on: boolean): Choice {
  const added = without(old?.added, path);
  const removed = without(old?.removed, path);
  return { added: on ? [...added, path] : added, removed: on ? removed : [...removed, path] };
}
