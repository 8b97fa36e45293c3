import { expect, test } from "vitest";
import { layOut, rowAt } from "./layout";
import { buildLanes, type SpanColumns } from "./spans";

function run(slots: number, ranks: number): SpanColumns {
  const rows = [
    ...Array.from({ length: slots }, (_, lane) => ({ component: "inference", name: "decode", server: 0 as number | null, rank: null as number | null, lane: lane as number | null })),
    ...Array.from({ length: ranks }, (_, rank) => ({ component: "trainer", name: "forward", server: null, rank, lane: null })),
  ];
  return {
    component: rows.map((r) => r.component), name: rows.map((r) => r.name), server: rows.map((r) => r.server), rank: rows.map((r) => r.rank),
    lane: rows.map((r) => r.lane), step: rows.map(() => 0), micro_batch: rows.map(() => null), sample_id: rows.map(() => null),
    start: rows.map(() => 0), end: rows.map(() => 1),
  };
}

test("slots share the height, and many slots scroll", () => {
  expect(layOut(buildLanes(run(24, 2)), 2, 700).engines[0]!.slotHeight).toBe(12);
  const many = layOut(buildLanes(run(2048, 2)), 2, 700);
  expect(many.engines[0]!.slotHeight).toBe(1);
  expect(many.height).toBeGreaterThan(1000);
});

test("a height leads to its lane, and gaps to none", () => {
  const layout = layOut(buildLanes(run(24, 2)), 0, 700);
  const row = layout.engines[0]!.rows[7]!;
  expect(rowAt(layout, row.y + 2)?.lane.slot).toBe(7);
  expect(rowAt(layout, layout.trainer[1]!.y + 5)?.lane.owner).toBe(1);
  expect(rowAt(layout, 5)).toBeNull();
});
