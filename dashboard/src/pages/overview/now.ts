/** The state of the servers in a few words. */

import type { Server } from "../../types";

const FINE = /^(serving|ready|receiving weights)/;

/** Returns how many servers serve, or what the first does that does not. */
export function serversOf(servers: Server[]): { text: string; bad: boolean } {
  const other = servers.filter((server) => !FINE.test(server.doing));
  if (servers.length === 0) return { text: "–", bad: false };
  const [first] = other;
  if (!first) {
    const syncing = servers.filter((server) => server.doing.startsWith("receiving")).length;
    return { text: syncing > 0 ? `${syncing} of ${servers.length} receiving weights` : servers.length === 1 ? "1 serving" : `all ${servers.length} serving`, bad: false };
  }
  return { text: `${servers.length - other.length} of ${servers.length} serving, ${first.name.replace("server ", "")} ${first.doing}`, bad: /down|failed|restart/.test(first.doing) };
}
