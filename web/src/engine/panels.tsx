import type { ComponentChildren, VNode } from "preact";
import { messageOf } from "../api/errors";
import { request } from "../api/http";
import { showToast } from "../app";
import { Icon } from "../ui/icon";
import { shownBytes, shownCount, shownRate, shownSeconds } from "../ui/shown";
import type { EngineState } from "./state";
import type { Histogram, QueueEntry, SlotEntry } from "./types";

/** A part of the view with a title. note: beside the title. */
export function Panel(props: { title: string; note?: string; class?: string; children: ComponentChildren }): VNode {
  return (
    <section class={`panel ${props.class ?? ""}`} aria-label={props.title}>
      <header>
        <h2>{props.title}</h2>
        {props.note && <span class="muted">{props.note}</span>}
      </header>
      {props.children}
    </section>
  );
}

/** The numbers that say how it goes, in one line. */
export function Figures({ state }: { state: EngineState }): VNode {
  const { rates, counts, others, slots, queue, config, engine } = state;
  const used = (slots?.length ?? 0) + (others?.slots ?? 0);
  const cached = counts?.["cached_prompt_tokens"] ?? 0;
  const prompt = counts?.["prompt_tokens"] ?? 0;
  const drafts = counts?.["draft_tokens"] ?? 0;
  return (
    <dl class="figures">
      <Figure name="Engine" value={engine?.state ?? "–"} note={engine?.num_restarts ? `${engine.num_restarts} restarts` : ""} />
      <Figure name="Generated" value={shownRate(rates?.generated_per_s)} unit="tokens/s" />
      <Figure name="Prefill" value={shownRate(rates?.prefill_per_s)} unit="tokens/s" />
      <Figure name="Ticks" value={shownRate(rates?.ticks_per_s)} unit="/s" />
      <Figure name="Slots" value={`${used}/${config?.num_slots ?? "–"}`} note={used ? "in use" : "idle"} />
      <Figure name="Waiting" value={shownCount(queue?.waiting)} />
      <Figure name="Prompt cache" value={prompt ? `${Math.round((100 * cached) / prompt)} %` : "–"} note="hits" />
      {drafts > 0 && <Figure name="Drafts" value={`${Math.round((100 * (counts?.["accepted_tokens"] ?? 0)) / drafts)} %`} note="accepted" />}
    </dl>
  );
}

function Figure({ name, value, unit = "", note = "" }: { name: string; value: string; unit?: string; note?: string }): VNode {
  return (
    <div>
      <dt>{name}</dt>
      <dd>
        {value} {unit && <small>{unit}</small>}
        {note && <small>{note}</small>}
      </dd>
    </div>
  );
}

/** The work of each slot. focused: the request under the pointer, also in other panels. */
export function Slots(props: { state: EngineState; focused: number | null; onFocus: (key: number | null) => void }): VNode {
  const { slots = [], others, config } = props.state;
  const used = slots.length + (others?.slots ?? 0);
  return (
    <Panel title="Slots" note={`${used} of ${config?.num_slots ?? "–"} in use`} class="slots">
      <div class="table" tabIndex={0} role="region" aria-label="Slots in use">
        <table>
          <thead>
            <tr>
              <th>Slot</th>
              <th>Request</th>
              <th>State</th>
              <th class="align-right">Tokens/s</th>
              <th>Prompt and output</th>
              <th class="align-right">Cached</th>
              <th class="align-right">Time</th>
              <th>
                <span class="off-screen">Cancel</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {slots.map((slot) => (
              <SlotRow key={slot.id} slot={slot} isFocused={slot.key === props.focused} onFocus={props.onFocus} />
            ))}
          </tbody>
        </table>
      </div>
      {slots.length === 0 && <p class="note">No slot is in use{others ? " by requests of yours" : ""}.</p>}
      {others && (
        <p class="note">
          Other tenants: {others.slots} slots ({others.prefilling} prefill, {others.decoding} decode
          {others.paused > 0 && `, ${others.paused} paused`}), {shownRate(others.tokens_per_s)} tokens/s.
        </p>
      )}
    </Panel>
  );
}

function SlotRow({ slot, isFocused, onFocus }: { slot: SlotEntry; isFocused: boolean; onFocus: (key: number | null) => void }): VNode {
  return (
    <tr class={isFocused ? "focused" : ""} onPointerEnter={() => onFocus(slot.key)} onPointerLeave={() => onFocus(null)}>
      <td>{slot.id}</td>
      <td title={slot.request_id}>
        #{slot.key}
        {slot.choice > 0 && `.${slot.choice}`}
      </td>
      <td>
        <span class={`state ${slot.state}`}>{slot.state}</span>
        {slot.num_preempted > 0 && <span class="state preempted">preempted {slot.num_preempted}×</span>}
      </td>
      <td class="align-right">{shownRate(slot.state === "prefilling" ? null : slot.tokens_per_s)}</td>
      <td>
        <Progress slot={slot} />
      </td>
      <td class="align-right">{shownCount(slot.cached_tokens)}</td>
      <td class="align-right">{shownSeconds(slot.running_s)}</td>
      <td>
        <button type="button" class="icon-button" aria-label={`Cancel request ${slot.key}`} title="Cancel this request" onClick={() => void cancel(slot.request_id)}>
          <Icon name="close" />
        </button>
      </td>
    </tr>
  );
}

/** The prompt and the output of a sequence as one bar: cached, computed, generated, and the rest. */
function Progress({ slot }: { slot: SlotEntry }): VNode {
  const whole = slot.prompt_tokens + Math.max(slot.generated_tokens, slot.max_tokens ?? Math.max(slot.generated_tokens * 1.25, 64));
  const share = (tokens: number): string => `${(100 * Math.max(0, tokens)) / whole}%`;
  const computed = Math.min(slot.prompt_tokens, slot.computed_tokens) - slot.cached_tokens;
  return (
    <span class="progress" title={`${slot.computed_tokens} tokens are computed`}>
      <span class="progress-bar" aria-hidden="true">
        <i class="cached" style={{ width: share(slot.cached_tokens) }} />
        <i class="prefill" style={{ width: share(computed) }} />
        <i class="rest" style={{ width: share(slot.prompt_tokens - slot.cached_tokens - Math.max(0, computed)) }} />
        <i class="decode" style={{ width: share(slot.generated_tokens) }} />
      </span>
      <span class="progress-text">
        {shownCount(slot.prompt_tokens)} + {shownCount(slot.generated_tokens)}
        {slot.max_tokens !== null && <span class="muted">/{shownCount(slot.max_tokens)}</span>}
      </span>
    </span>
  );
}

async function cancel(requestId: string): Promise<void> {
  try {
    await request(`v1/requests/${encodeURIComponent(requestId)}/cancel`, { method: "POST", headers: { "content-type": "application/json" }, body: "{}" });
  } catch (error) {
    showToast(messageOf(error));
  }
}

const MOST_QUEUED = 20;

/** The sequences that wait for a slot, with reasons. */
export function Queue({ state }: { state: EngineState }): VNode {
  const { queue, others } = state;
  const waiting = queue?.sequences ?? [];
  return (
    <Panel title="Queue" note={`${shownCount(queue?.waiting ?? 0)} waiting`} class="queue">
      {waiting.length === 0 && <p class="note">{others?.waiting ? `${others.waiting} sequences of other tenants wait.` : "No request waits."}</p>}
      <ol class="queue-list">
        {waiting.slice(0, MOST_QUEUED).map((one) => (
          <QueueItem key={`${one.key}.${one.choice}`} entry={one} />
        ))}
      </ol>
      {waiting.length > MOST_QUEUED && <p class="note">and {(queue?.waiting ?? 0) - MOST_QUEUED} more</p>}
      {(queue?.embeddings ?? 0) > 0 && <p class="note">{queue?.embeddings} embedding requests wait.</p>}
    </Panel>
  );
}

function QueueItem({ entry }: { entry: QueueEntry }): VNode {
  return (
    <li>
      <span title={entry.request_id}>#{entry.key}</span>
      <span class="muted">{shownCount(entry.prompt_tokens)} tokens</span>
      {entry.is_preempted && <span class="state preempted">preempted</span>}
      {entry.waits_for !== null && <span class="state">waits for the prefix of #{entry.waits_for}</span>}
      {entry.reads_disk && <span class="state">reads its prefix from the disk</span>}
      <span class="push">{shownSeconds(entry.waiting_s)}</span>
    </li>
  );
}

/** The memory of the KV cache and the process. */
export function MemoryPanel({ state }: { state: EngineState }): VNode {
  const { memory, config } = state;
  const cells = config?.num_cells ?? null;
  const running = memory?.running_cells ?? 0;
  const cached = memory?.cached_cells ?? 0;
  return (
    <Panel title="Memory" class="memory">
      {cells !== null && cells > 0 && (
        <>
          <div class="stack" role="img" aria-label={`Of ${cells} cells ${running} are running and ${cached} cached.`}>
            <i class="decode" style={{ width: `${(100 * running) / cells}%` }} />
            <i class="cached" style={{ width: `${(100 * cached) / cells}%` }} />
          </div>
          <p class="legend">
            <span>
              <i class="swatch decode" />
              running {shownCount(running)}
            </span>
            <span>
              <i class="swatch cached" />
              cached {shownCount(cached)}
            </span>
            <span class="muted">
              of {shownCount(cells)} cells
            </span>
          </p>
        </>
      )}
      <dl class="facts">
        <dt>Host cache</dt>
        <dd>
          {shownBytes(memory?.host_bytes ?? 0)}
          {config && <span class="muted"> of {shownBytes(config.host_bytes)}</span>}
        </dd>
        <dt>Process</dt>
        <dd>{memory?.rss_bytes == null ? "–" : shownBytes(memory.rss_bytes)}</dd>
        <dt>Evicted</dt>
        <dd>{shownCount(state.counts?.["evicted_tokens"] ?? 0)} tokens</dd>
        <dt>Preemptions</dt>
        <dd>{shownCount(state.counts?.["preemptions"] ?? 0)}</dd>
      </dl>
    </Panel>
  );
}

/** How requests have ended since the engine began. */
export function Requests({ state }: { state: EngineState }): VNode {
  const names: Array<[string, string]> = [
    ["submitted", "Submitted"],
    ["completed", "Completed"],
    ["cancelled", "Cancelled"],
    ["failed", "Failed"],
  ];
  return (
    <Panel title="Requests" class="requests">
      <dl class="facts">
        {names.map(([name, label]) => (
          <>
            <dt>{label}</dt>
            <dd>{shownCount(state.counts?.[name] ?? 0)}</dd>
          </>
        ))}
        <dt>Prompt tokens</dt>
        <dd>{shownCount(state.counts?.["prompt_tokens"] ?? 0)}</dd>
        <dt>Generated</dt>
        <dd>{shownCount(state.counts?.["generated_tokens"] ?? 0)}</dd>
      </dl>
    </Panel>
  );
}

/** A distribution of latencies. target: seconds, drawn as a line. */
export function Latency(props: { title: string; histogram: Histogram | undefined; target?: number | null }): VNode {
  const { histogram, title } = props;
  const bins = histogram ? binsOf(histogram) : [];
  if (!histogram || bins.length === 0) {
    return (
      <Panel title={title} class="latency">
        <p class="note">Nothing was measured yet.</p>
      </Panel>
    );
  }
  const most = Math.max(...bins.map((bin) => bin.count));
  const percentiles = `p50 ${shownOrNone(histogram.p50)} · p95 ${shownOrNone(histogram.p95)} · p99 ${shownOrNone(histogram.p99)}`;
  return (
    <Panel title={title} note={percentiles} class="latency">
      <div class="histogram" role="img" aria-label={`${title}: ${percentiles}`}>
        {bins.map((bin) => (
          <span title={`${bin.label}: ${shownCount(bin.count)}`}>
            <i class={props.target != null && bin.from >= props.target ? "late" : ""} style={{ height: `${(100 * bin.count) / most}%` }} />
          </span>
        ))}
      </div>
      <p class="histogram-axis muted">
        <span>{shownSeconds(bins[0]?.from ?? 0)}</span>
        <span>{bins.at(-1)?.to === null ? `over ${shownSeconds(bins.at(-1)?.from ?? 0)}` : shownSeconds(bins.at(-1)?.to ?? 0)}</span>
      </p>
    </Panel>
  );
}

interface Bin {
  from: number;
  to: number | null;
  count: number;
  label: string;
}

/** Return the bins of a histogram without the empty bins at its ends. */
export function binsOf(histogram: Histogram): Bin[] {
  const { bounds, counts } = histogram;
  const first = counts.findIndex((count) => count > 0);
  if (first < 0) return [];
  const last = counts.findLastIndex((count) => count > 0);
  return counts.slice(first, last + 1).map((count, at) => {
    const index = first + at;
    const from = index ? (bounds[index - 1] ?? 0) : 0;
    const to = bounds[index] ?? null;
    return { from, to, count, label: to === null ? `over ${shownSeconds(from)}` : `${shownSeconds(from)} to ${shownSeconds(to)}` };
  });
}

function shownOrNone(seconds: number | null): string {
  return seconds === null ? "–" : shownSeconds(seconds);
}
