import { expect, test } from "vitest";
import { choose, parseProject } from "./projects";

test("a project is named by entity and project, or by its address", () => {
  expect(parseProject(" me/math ")).toBe("me/math");
  expect(parseProject("https://wandb.ai/me/math/runs/abc?nw=1")).toBe("me/math");
  for (const end of ["", "/", "/workspace", "?nw=nwuserme", "/sweeps/abc", "/overview#a"]) expect(parseProject(`https://wandb.ai/me/math${end}`)).toBe("me/math");
  for (const text of ["", "math", "me/math/sweep", "a/b/c", "me/m th"]) expect(parseProject(text)).toBeNull();
});

test("a project is either added or removed", () => {
  const added = choose(null, "me/math", true);
  expect(added).toEqual({ added: ["me/math"], removed: [] });
  const removed = choose(added, "me/math", false);
  expect(removed).toEqual({ added: [], removed: ["me/math"] });
  expect(choose(removed, "me/math", true)).toEqual(added);
});
