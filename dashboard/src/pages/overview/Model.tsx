/** Architecture of the model: parts, sizes, parameters. */

import { runPath } from "../../api";
import { count, number } from "../../format";
import { useResource } from "../../state/resource";
import type { Architecture } from "../../types";
import { visible } from "../../text/hostile";
import "../panes.css";

/** Returns a number of parameters as models are named: 1.7B. */
const size = (parameters: number | null): string => number(parameters).replace("G", "B");

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
        <table className="parts" title={`From ${model.source}`}>
          <tbody>
            {model.parts.map((part) => (
              <tr key={part.part}>
                <td className="r f">{part.count > 1 ? `${part.count} ×` : ""}</td>
                <td>
                  {part.part} <span className="f">{part.sizes}</span>
                </td>
                <td className="r">{part.parameters > 0 ? size(part.count * part.parameters) : ""}</td>
              </tr>
            ))}
          </tbody>
        </table>
      ) : (
        <p className="f s">The record does not have its config.json.</p>
      )}
    </section>
  );
}
