/** Lists the hardware of the run's machines. Equal machines are one entry. */

import { groups, rollup } from "d3-array";
import { number } from "../../format";
import { visible } from "../../text/hostile";
import type { Node } from "../../types";

/** Returns what was recorded about a machine, in words. */
export function factsOf(node: Node): [name: string, value: string][] {
  const gpus = [...rollup(node.gpus, (equal) => equal.length, (name) => name)];
  const facts: [string, string | null][] = [
    ["CPU", node.cpu === null ? null : `${node.cpu}, ${node.num_cores ?? "?"} cores`],
    ["memory", node.memory_bytes === null ? null : `${number(node.memory_bytes / 2 ** 30, 0)} GiB`],
    ["GPUs", gpus.length ? gpus.map(([name, count]) => (count > 1 ? `${count} × ${name}` : name)).join("; ") : null],
    ["GPU driver", node.gpu_driver],
    ["links", node.links.length ? node.links.join("; ") : null],
    ["system", node.os],
  ];
  return facts.flatMap(([name, value]) => (value ? [[name, visible(value)]] : []));
}

export function Hardware({ nodes }: { nodes: Node[] }) {
  return (
    <>
      {groups(nodes, (node) => JSON.stringify(factsOf(node))).map(([, equal]) => (
        <section key={equal[0]!.node} className="sec" aria-label="Hardware">
          <h2>
            Hardware <span title={visible(equal.map((node) => node.node ?? "").join(", "))}>{equal.length === 1 ? visible(equal[0]!.node ?? "") : `${equal.length} machines`}</span>
          </h2>
          <dl className="kv">
            {factsOf(equal[0]!).map(([name, value]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
        </section>
      ))}
    </>
  );
}
