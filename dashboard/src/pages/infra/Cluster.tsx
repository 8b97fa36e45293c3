/** The machines of a run, what runs on their GPUs, and how busy each is. */

import { useState } from "react";
import { number, percent } from "../../format";
import type { Value } from "../../types";
import { byRole, type Machine } from "./infra";

/** With more devices, those of one role on a machine share a line until the machine is opened. */
const MOST_DEVICES = 16;

function Meter({ share, mean }: { share: Value; mean?: Value }) {
  return (
    <span className="meter" aria-hidden="true">
      {share !== null && <i style={{ width: `${Math.min(100, 100 * share)}%` }} />}
      {mean != null && <b style={{ left: `${Math.min(100, 100 * mean)}%` }} />}
    </span>
  );
}

const gib = (bytes: Value) => number(bytes === null ? null : bytes / 2 ** 30, 1);

export function Cluster({ nodes, live }: { nodes: readonly Machine[]; live: boolean }) {
  const when = live ? "now" : "at the end";
  const many = nodes.reduce((sum, node) => sum + node.devices.length, 0) > MOST_DEVICES;
  const [opened, setOpened] = useState<ReadonlySet<string>>(new Set());
  const toggle = (name: string) => setOpened((old) => new Set(old.has(name) ? [...old].filter((other) => other !== name) : [...old, name]));
  return (
    <section className="cluster" aria-label="Machines">
      <table>
        <thead>
          <tr>
            <th>Machine</th>
            <th>Role</th>
            <th>
              Load <span className="f">{when}, bar; mean, line</span>
            </th>
            <th className="r">{when}</th>
            <th className="r">mean</th>
            <th className="r">memory, GiB</th>
            <th className="r">of</th>
          </tr>
        </thead>
        <tbody>
          {nodes.flatMap((node) => [
            <tr key={node.name} className="node">
              <td>
                {many && node.devices.length > 0 ? (
                  <button aria-expanded={opened.has(node.name)} onClick={() => toggle(node.name)}>
                    <b>{node.name}</b> <span className="f">{opened.has(node.name) ? "▾" : "▸"}</span>
                  </button>
                ) : (
                  <b>{node.name}</b>
                )}
              </td>
              <td className="d">CPU, load {number(node.load, 1)}</td>
              <td>
                <Meter share={node.cpu} mean={node.cpuMean} />
              </td>
              <td className="r">{percent(node.cpu, 0)}</td>
              <td className="r">{percent(node.cpuMean, 0)}</td>
              <td className="r">{gib(node.memoryUsed)}</td>
              <td className="r d">{gib(node.memoryTotal)}</td>
            </tr>,
            ...(many && !opened.has(node.name) ? byRole(node.devices) : node.devices).map((device) => (
              <tr key={`${node.name}/${device.name}/${device.role}`}>
                <td className="in">{device.name}</td>
                <td className="d">{device.role}</td>
                <td>
                  <Meter share={device.load} mean={device.mean} />
                </td>
                <td className="r">{percent(device.load, 0)}</td>
                <td className="r">{percent(device.mean, 0)}</td>
                <td className="r">{gib(device.used)}</td>
                <td className="r d">{device.total === null ? "" : gib(device.total)}</td>
              </tr>
            )),
          ])}
        </tbody>
      </table>
    </section>
  );
}
