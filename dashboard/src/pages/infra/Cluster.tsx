/** The machines of a run, what runs on their GPUs, and how busy each is. */

import { useState } from "react";
import { NONE, number, percent } from "../../format";
import { toggled } from "../../lists";
import { type Column, Table } from "../../shell/Table";
import type { Value } from "../../types";
import { useParam } from "../../state/url";
import { byRole, type Device, type Machine, roleColor, roleOfDevice } from "./infra";
import { visible } from "../../text/hostile";

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
  const [view] = useParam("machines");
  return view === "table" ? <Machines nodes={nodes} live={live} /> : <Map nodes={nodes} live={live} />;
}

/** Tiles in a row: those of a machine with fewer are not wider. */
const [LEAST_TILES, MOST_TILES] = [6, 8];

/** With more machines, tiles are small and without words. */
const MOST_NODES = 12;

/** Every machine with its GPUs as tiles: filled by load, in the color of their role. */
function Map({ nodes, live }: { nodes: readonly Machine[]; live: boolean }) {
  const devices = nodes.flatMap((node) => node.devices);
  const roles = [...new Set(devices.map(roleOfDevice))].sort();
  return (
    <section className="cluster" aria-label="Machines">
      <p className="legend s d">
        {roles.map((role) => {
          const mine = devices.filter((device) => roleOfDevice(device) === role);
          const loads = mine.flatMap((device) => device.load ?? []);
          return (
            <span key={role}>
              <i className="dot" style={{ background: `var(${roleColor(role)})` }} />
              {role}: {mine.length} {mine[0]!.name.replace(/ \d+$/, "")}
              {mine.length === 1 ? "" : "s"}
              {loads.length > 0 && `, ${percent(loads.reduce((sum, load) => sum + load, 0) / loads.length, 0)} busy ${live ? "now" : "at the end"}`}
            </span>
          );
        })}
        <span className="f">height: load, mark: its mean, stripe: memory</span>
      </p>
      <div className={`map ${nodes.length > MOST_NODES ? "small" : ""}`}>
        {nodes.map((node) => (
          <section key={node.name} aria-label={visible(node.name)}>
            <h2>
              <b className="cut">{visible(node.name)}</b>
              <span className="f s">
                CPU {percent(node.cpu, 0)}, {gib(node.memoryUsed)} of {gib(node.memoryTotal)} GiB
              </span>
            </h2>
            <Meter share={node.cpu} mean={node.cpuMean} />
            <ul style={{ gridTemplateColumns: `repeat(${Math.min(MOST_TILES, Math.max(LEAST_TILES, node.devices.length))}, minmax(0, 1fr))` }}>
              {node.devices.map((device) => (
                <Tile key={`${device.name}/${device.role}`} device={device} />
              ))}
            </ul>
          </section>
        ))}
      </div>
    </section>
  );
}

function Tile({ device }: { device: Device }) {
  const role = roleOfDevice(device);
  const share = (value: Value) => `${100 * Math.min(1, Math.max(0, value ?? 0))}%`;
  const memory = device.used !== null && device.total ? device.used / device.total : null;
  const words = `${device.name}, ${device.role}: load ${percent(device.load, 0)}, mean ${percent(device.mean, 0)}${device.used === null ? "" : `, memory ${gib(device.used)}${device.total === null ? "" : ` of ${gib(device.total)}`} GiB`}`;
  return (
    <li title={words} className={role === "not used" ? "idle" : undefined} style={{ color: `var(${roleColor(role)})` }}>
      <span className="fill" style={{ height: share(device.load) }} />
      {device.mean !== null && <span className="mean" style={{ bottom: share(device.mean) }} />}
      {memory !== null && <span className="memory" style={{ height: share(memory) }} />}
      <b>{device.load === null ? NONE : number(100 * device.load, 0)}</b>
      <span className="who">{device.role === "inference" || device.role === "trainer" ? device.name : device.role.replace("trainer ", "").replace("not used", "free")}</span>
    </li>
  );
}

/** A row of the table: a machine, or a device of one. */
type Line = Omit<Device, "name"> & { key: string; name?: string; node?: Machine };

function Machines({ nodes, live }: { nodes: readonly Machine[]; live: boolean }) {
  const when = live ? "now" : "at the end";
  const many = nodes.reduce((sum, node) => sum + node.devices.length, 0) > MOST_DEVICES;
  const [opened, setOpened] = useState<ReadonlySet<string>>(new Set());
  const toggle = (name: string) => setOpened((old) => new Set(toggled([...old], name)));
  const nameOf = (node: Machine) =>
    many && node.devices.length > 0 ? (
      <button aria-expanded={opened.has(node.name)} onClick={() => toggle(node.name)}>
        <b>{visible(node.name)}</b> <span className="f">{opened.has(node.name) ? "▾" : "▸"}</span>
      </button>
    ) : (
      <b>{visible(node.name)}</b>
    );
  const rows = nodes.flatMap((node): Line[] => [
    { key: node.name, node, role: `CPU, load ${number(node.load, 1)}`, load: node.cpu, mean: node.cpuMean, used: node.memoryUsed, total: node.memoryTotal },
    ...(many && !opened.has(node.name) ? byRole(node.devices) : node.devices).map((device) => ({ ...device, key: `${node.name}/${device.name}/${device.role}` })),
  ]);
  const columns: Column<Line>[] = [
    { head: "Machine", cell: ({ node, name }) => (node ? nameOf(node) : <span className="in">{name}</span>) },
    { head: "Role", cell: ({ role }) => <span className="d">{role}</span> },
    { head: <>Load <span className="f">{when}, bar; mean, line</span></>, cell: ({ load, mean }) => <Meter share={load} mean={mean} /> },
    { head: when, className: "r", cell: ({ load }) => percent(load, 0) },
    { head: "mean", className: "r", cell: ({ mean }) => percent(mean, 0) },
    { head: "memory, GiB", className: "r", cell: ({ used }) => gib(used) },
    { head: "of", className: "r", cell: ({ node, total }) => <span className="d">{node || total !== null ? gib(total) : ""}</span> },
  ];
  return (
    <section className="cluster" aria-label="Machines">
      <Table rows={rows} columns={columns} keyOf={({ key }) => key} row={({ node }) => ({ className: node && "node" })} />
    </section>
  );
}
