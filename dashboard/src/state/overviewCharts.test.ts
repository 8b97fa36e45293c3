import { expect, test } from "vitest";
import { toggled } from "../lists";
import { chartOf, metricOf, parseCharts, STANDARD } from "./overviewCharts";

test("without a choice the standard charts are shown, with an empty one none", () => {
  expect(parseCharts(null)).toEqual(STANDARD.map((chart) => chart.id));
  expect(parseCharts({ charts: [] })).toEqual([]);
  expect(parseCharts({ charts: ["kl", 1, "kl", "metric:entropy"] })).toEqual(["kl", "metric:entropy"]);
});

test("a metric is pinned at the end, and taken off", () => {
  const charts = toggled(["reward"], chartOf("loss/policy"));
  expect(charts).toEqual(["reward", "metric:loss/policy"]);
  expect(toggled(charts, "reward")).toEqual(["metric:loss/policy"]);
  expect(charts.map(metricOf)).toEqual([null, "loss/policy"]);
});
