/** Shows the outcome of a run: each eval from its first to its newest result, and the best checkpoint with the commands that use it. */

import { embedded } from "../../embedded";
import { resultFormat, unbroken } from "../../format";
import { CopyButton, Segments } from "../../shell/controls";
import { useEvals, useStatus } from "../../state/run";
import { elsewhere, format, useParam, usePlace } from "../../state/url";
import type { RunInfo, Sentence, StepColumns } from "../../types";
import { visible } from "../../text/hostile";
import { bestCheckpoint, commandsOf, curvesOf, type EvalCurve, gainText, whyNone } from "./outcome";

/** Number of evals in the card. The Evals page has the others. */
const MOST = 3;

export function Outcome({ info, steps, sentence }: { info: RunInfo; steps: StepColumns; sentence: Sentence | undefined }) {
  const run = info.info.id;
  const { live } = useStatus(run);
  const curves = curvesOf(useEvals(run).data ?? []);
  const best = bestCheckpoint(steps, info.checkpoints, curves[0], null, info.written);
  if (curves.length === 0 && !sentence && !best) return null;
  return (
    <section className="outcome" aria-label="Outcome">
      {curves.slice(0, MOST).map((curve, i) => (
        <Result key={curve.name} curve={curve} live={live} first={i === 0} more={i === MOST - 1 ? curves.length - MOST : 0} />
      ))}
      {curves.length === 0 && sentence && (
        <div className="wide">
          <span className="l">Reward{live && steps.step.length > 0 ? `, as of step ${steps.step.at(-1)! + 1}` : ""}</span>
          <h1>{unbroken(sentence.text)}</h1>
        </div>
      )}
      <Checkpoint info={info} steps={steps} curve={curves[0]} live={live} />
    </section>
  );
}

function Result({ curve, live, first, more }: { curve: EvalCurve; live: boolean; first: boolean; more: number }) {
  const place = usePlace();
  const [before, newest] = [curve.rows[0]!, curve.rows.at(-1)!];
  const when = newest.step < 0 ? "before training" : `${live ? "as of step" : "after step"} ${newest.step + 1}`;
  const Tag = first ? "h1" : "p";
  const { value, bare, label, suffix } = resultFormat(newest.metric);
  return (
    <div title={`${label} of ${newest.num_items} items, with 95 % interval${gainText(before, newest)}`}>
      <a className="l cut" href={format(elsewhere(place, { page: "evals" }))}>
        {visible(curve.name)}
        {suffix}
        {more > 0 ? `, ${more} more` : ""}
      </a>
      <Tag className="n">
        {before !== newest && <span className="f">{value(before.accuracy)} → </span>}
        {value(newest.accuracy)}
      </Tag>
      <span className="s d">
        {newest.accuracy_low !== null && newest.accuracy_high !== null && `${bare(newest.accuracy_low)} to ${value(newest.accuracy_high)}, `}
        {when}
      </span>
    </div>
  );
}

function Checkpoint({ info, steps, curve, live }: { info: RunInfo; steps: StepColumns; curve: EvalCurve | undefined; live: boolean }) {
  const [chosen, choose] = useParam("use", "chat");
  const best = bestCheckpoint(steps, info.checkpoints, curve, info.final_model, info.written);
  const commands = embedded ? [] : commandsOf(info.path, best, info.checkpoints.at(-1), info.final_model, live);
  const command = commands.find((one) => one.does === chosen) ?? commands[0];
  const measured = best?.accuracy != null;
  return (
    <div className="ckpt">
      <span className="l">
        {measured ? "Best checkpoint" : best ? "Newest checkpoint" : "Checkpoint"}
        {commands.length > 0 && (
          <Segments label="Commands for the checkpoint" className="tabs" value={command!.does} options={commands.map(({ does }) => [does, does])} choose={choose} />
        )}
      </span>
      <p className="n">
        {best ? `step ${best.step}` : info.final_model ? "final model" : "none"}
        {measured && <span className="f">, {resultFormat(curve?.rows[0]?.metric).value(best.accuracy)}</span>}
        {best && !measured && curve && <span className="f">, not measured</span>}
      </p>
      {command ? (
        <span className="cmd">
          <code className="m" title={visible(command.text)}>
            {visible(command.text)}
          </code>
          <CopyButton className="btn" title="Copy" label={`Copy ${visible(command.text)}`} text={() => command.text} />
        </span>
      ) : (
        <span className="s d">{embedded ? "This file has no checkpoints." : best ? "Its files are not in the run directory." : whyNone(Number(info.config.checkpoint_every), live)}</span>
      )}
    </div>
  );
}
