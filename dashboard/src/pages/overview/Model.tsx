/** Architecture of the model: parts, sizes, parameters. */

import { runPath } from "../../api";
import { count, number } from "../../format";
import { type Column, Table } from "../../shell/Table";
import { useResource } from "../../state/resource";
import type { Architecture, ModelPart } from "../../types";
import { visible } from "../../text/hostile";
import "../panes.css";

/** Returns a number of parameters as models are named: 1.7B. */
const size = (parameters: number | null): string => number(parameters).replace("G", "B");

const PARTS: Column<ModelPart>[] = [
  { className: "r f", cell: (part) => part.count > 1 && `${part.count} ×` },
  { cell: (part) => <>{part.part} <span className="f">{part.sizes}</span></> },
  { className: "r", cell: (part) => part.parameters > 0 && size(part.count * part.parameters) },
];

export function Model({ run }: { run: string }) {
  const model = useResource<Architecture>(runPath(run, "model")).data;
  if (!model?.name) return null;
  const context = model.max_position_embeddings;
  const facts = [
    model.parameters !== null && `${size(model.parameters)} parameters`,
    model.parameters !== model.active_parameters && `${size(model.active_parameters)} for a token`,
    model.layers !== null && `${model.layers} layers`,
    context !== null && `context of ${count(context)}`,
    model.kv_bytes_per_token !== null && `${number(model.kv_bytes_per_token / 1024)} KiB of KV cache a token (bfloat16)`,
  ].filter(Boolean);
  return (
    <section className="sec">
      <h2>
        Model <span className="cut" title={visible(model.name)}>{visible(model.model_type ?? "")}</span>
      </h2>
      <p className="m wrap">{visible(model.name)}</p>
      {facts.length > 0 && <p className="s d">{facts.join(", ")}</p>}
      {model.parts.length > 0 ? (
        <Table className="parts" title={`From ${model.source}`} rows={model.parts} columns={PARTS} keyOf={(part) => part.part} />
      ) : (
        <p className="f s">The record does not have its config.json.</p>
      )}
    </section>
  );
}
