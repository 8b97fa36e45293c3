/** Edits which W&B projects are listed: projects that the server found with the user's key or the user added, without removed ones. */

import { useState } from "react";
import { count } from "../../format";
import { FieldForm } from "../../shell/controls";
import { Dialog } from "../../shell/Dialog";
import { useDocument } from "../../state/documents";
import { useResource } from "../../state/resource";
import { useTick } from "../../state/timing";
import type { Project, Projects as ProjectList } from "../../types";
import { visible } from "../../text/hostile";
import { type Choice, choose, parseProject } from "./projects";

const OPENED_MS = 1_000;
const CLOSED_MS = 15_000;

/** Returns the projects, or null where there is nothing to show or change. */
function useProjects(everyMs: number): ProjectList | null {
  const list = useResource<ProjectList>("/api/projects", {}, useTick(everyMs)).data;
  return list && (list.can_change || list.projects.length) ? list : null;
}

export function ProjectsButton({ open, tells = false }: { open: () => void; tells?: boolean }) {
  const list = useProjects(CLOSED_MS);
  if (!list) return null;
  return (
    <>
      <button className="btn" onClick={open}>
        W&amp;B projects{list.projects.length > 0 && <span className="f"> {count(list.projects.length)}</span>}
      </button>
      {tells && list.problem && <p className="d">{visible(list.problem)}</p>}
    </>
  );
}

export function ProjectsDialog({ close }: { close: () => void }) {
  const list = useProjects(OPENED_MS);
  const { change, error } = useDocument<Choice>("projects");
  const [text, setText] = useState("");
  const [refused, setRefused] = useState(false);
  const set = (path: string, on: boolean) => change((old) => choose(old, path, on));
  const add = () => {
    const path = parseProject(text);
    setRefused(path === null);
    if (path === null) return;
    set(path, true);
    setText("");
  };
  return list && (
    <Dialog close={close} title="Projects on W&B">
      <div className="projects">
        {list.can_change && (
          <FieldForm label="Project to add" placeholder="ENTITY/PROJECT, or its address" aria-invalid={refused} value={text} change={(next) => (setText(next), setRefused(false))} submit={add} button="Add" />
        )}
        {refused && (
          <p className="w" role="alert">
            A project is named as in my-team/my-project, or by its address in a browser.
          </p>
        )}
        <ul>
          {list.projects.map((project) => (
            <Row key={project.path} project={project} action={list.can_change ? "Remove" : null} act={() => set(project.path, false)} />
          ))}
          {list.can_change &&
            list.removed.map((path) => <Row key={path} project={{ path, runs: 0, problem: "removed by you" }} action="Show again" act={() => set(path, true)} />)}
        </ul>
        {error && <p className="w">{error.message}</p>}
        {list.can_change && list.problem && <p className="d">{visible(list.problem)}</p>}
        <p className="f s">
          {list.can_change
            ? "Projects with Telescope runs are found with the key of wandb login. Removing one here changes nothing on W&B."
            : "These projects were named on the command line. Without an argument, telescope ui finds your projects."}
        </p>
      </div>
    </Dialog>
  );
}

function Row({ project, action, act }: { project: Project; action: string | null; act: () => void }) {
  const path = visible(project.path);
  return (
    <li>
      <span className="cut">{path}</span>
      <span className="f nb">{project.runs > 0 && `${count(project.runs)} ${project.runs === 1 ? "run" : "runs"}`}</span>
      {action && (
        <button className="link" aria-label={`${action} ${path}`} onClick={act}>
          {action}
        </button>
      )}
      {project.problem && <span className="d s">{visible(project.problem)}</span>}
    </li>
  );
}
