// The rules of the board, as board_rules.py has them, for where no Python runs; a test holds the two against each other.
// What the board alone asks stands here alone: whether caps leave a way to the end, and the best that a position can become.
// Actions are text ("0F2"), a span is {rank, action, start, end}.

const ORDER = "FBIW";
export const POLICIES = { "forward first": "FIBW", "backward first": "BIFW", "zero bubble": "IFWB" };
const MOVE = /^(-?)(\d{1,6}[FBIW]\d{1,6})(?:@(\d{1,6}))?$/, FORM = "write stage, kind and microbatch, as in 0F0, 0W0@3 or -0F0";

// Not an Error, whose stack would cost more than the rule: thousands are thrown and caught for one list of legal actions.
export class Refused {
  constructor(why, message) {
    Object.assign(this, { why, message });
  }
}

export function parse(text) {
  const [, stage, kind, microbatch] = /^(\d+)([FBIW])(\d+)$/.exec(text);
  return { stage: Number(stage), kind, microbatch: Number(microbatch) };
}

export const spelled = (time) => String(Number(time.toFixed(3)));
const key = (what, stage, microbatch) => `the ${what} of microbatch ${microbatch} from stage ${stage}`;

function provides({ stage, kind, microbatch }) {
  if (kind === "F") return [key("activation", stage, microbatch)];
  const gradient = key("gradient", stage, microbatch), weights = key("weight gradient", stage, microbatch);
  return kind === "I" ? [gradient] : kind === "W" ? [weights] : [gradient, weights];
}

// [what, stage] of what an action needs
function wants({ stage, kind }, stages) {
  if (kind === "F") return stage > 0 ? [["activation", stage - 1]] : [];
  if (kind === "W") return [["gradient", stage]];
  return stage + 1 < stages ? [["activation", stage], ["gradient", stage + 1]] : [["activation", stage]];
}

export function heldAfter(row) {
  let held = 0;
  return row.map((span) => {
    const { kind } = parse(span.action);
    held += kind === "F" ? 1 : kind === "I" ? 0 : -1;
    return held;
  });
}

function less(a, b) {
  for (let i = 0; i < a.length; i += 1) if (a[i] !== b[i]) return a[i] < b[i];
  return false;
}

export class Position {
  constructor(game) {
    this.game = game;
    this.ranks = game.limits.length;
    this.stages = game.placement.length;
    this.kinds = game.split ? "FBIW" : "FB";
    this.stagesOf = game.limits.map((_, rank) => game.placement.flatMap((home, stage) => (home === rank ? [stage] : [])));
    this.rows = game.limits.map(() => []);
    this.maker = new Map();
  }

  copy() {
    return Object.assign(new Position(this.game), { rows: this.rows.map((row) => [...row]), maker: new Map(this.maker) });
  }

  // As what and when it would be placed.
  spanOf(action, at) {
    const after = this.copy();
    after.place(action, at);
    return after.rows[this.rankOf(action)].find((span) => span.action === action);
  }

  rankOf(action) {
    return this.game.placement[parse(action).stage];
  }

  get spans() {
    return this.rows.flat();
  }

  get makespan() {
    return Math.max(0, ...this.rows.map((row) => (row.length ? row.at(-1).end : 0)));
  }

  get left() {
    return 3 * this.stages * this.game.microbatches - this.maker.size;
  }

  get peaks() {
    return this.rows.map((row) => Math.max(0, ...heldAfter(row)));
  }

  place(action, at = null) {
    this.refuseUnlessPossible(action);
    return this.insert(action, this.indexAt(this.rankOf(action), at));
  }

  placeAt(action, index) {
    this.refuseUnlessPossible(action);
    this.insert(action, Math.min(index, this.rows[this.rankOf(action)].length));
  }

  whyNot(action, at = null) {
    try {
      this.refuseUnlessPossible(action);
      this.fit(action, this.indexAt(this.rankOf(action), at));
    } catch (refused) {
      if (refused instanceof Refused) return refused;
      throw refused;
    }
    return null;
  }

  legal(rank, at = null) {
    const found = [];
    for (const stage of this.stagesOf[rank]) {
      for (let microbatch = 0; microbatch < this.game.microbatches; microbatch += 1) {
        for (const kind of this.kinds) {
          const action = `${stage}${kind}${microbatch}`;
          if (this.whyNot(action, at) === null) {
            const start = this.fit(action, this.indexAt(rank, at));
            found.push({ action, rank: [start, ORDER.indexOf(kind), microbatch, stage] });
          }
        }
      }
    }
    return found.sort((a, b) => (less(a.rank, b.rank) ? -1 : 1)).map((each) => each.action);
  }

  // For each microbatch how many of its forwards and backwards are placed.
  get steps() {
    return Array.from({ length: this.game.microbatches }, (_, i) => ["activation", "gradient"].reduce((sum, what) => (
      sum + this.game.placement.filter((_, stage) => this.maker.has(key(what, stage, i))).length), 0));
  }

  finishes() {
    return leads(this.game, this.steps);
  }

  startOf(action) {
    this.refuseUnlessPossible(action);
    return this.fit(action, this.rows[this.rankOf(action)].length);
  }

  inFlight(stage) {
    let count = 0;
    for (const span of this.spans) {
      const action = parse(span.action);
      if (action.stage === stage) count += action.kind === "F" ? 1 : action.kind === "W" ? 0 : -1;
    }
    return count;
  }

  nextOf(rank, kind, at = null) {
    this.indexAt(rank, at);
    for (const action of this.legal(rank, at)) if (parse(action).kind === kind) return action;
    for (let microbatch = 0; microbatch < this.game.microbatches; microbatch += 1) {
      for (const stage of this.stagesOf[rank]) {
        const refused = this.whyNot(`${stage}${kind}${microbatch}`, at);
        if (refused !== null && refused.why !== "placed") throw refused;
      }
    }
    throw new Refused("nothing", `rank ${rank} has no ${kind} left to place`);
  }

  remove(action) {
    const home = /^\d+[FBIW]\d+$/.test(action) ? this.rankOf(action) : undefined;
    const place = home === undefined ? -1 : this.rows[home].findIndex((span) => span.action === action);
    if (place < 0) throw new Refused("nothing", `${action} is not on the board`);
    const keep = this.rows.map((row) => row.length);
    keep[home] = place;
    for (let changed = true; changed; ) {
      changed = false;
      const gone = new Set(this.rows.flatMap((row, rank) => row.slice(keep[rank]).map((span) => span.action)));
      this.rows.forEach((row, rank) => {
        const first = row.slice(0, keep[rank]).findIndex((span) =>
          this.needs(span.action).some((product) => gone.has(this.maker.get(product.key).action)));
        if (first >= 0) {
          keep[rank] = first;
          changed = true;
        }
      });
    }
    this.rows.forEach((row, rank) => {
      for (const span of row.splice(keep[rank])) for (const product of provides(parse(span.action))) this.maker.delete(product);
    });
  }

  gaps() {
    const found = [], end = this.makespan;
    this.rows.forEach((row, rank) => {
      let free = 0;
      for (const span of row) {
        if (span.start > free) found.push([rank, free, span.start, this.whyWaits(span, free)]);
        free = span.end;
      }
      if (end > free) {
        const why = this.leftOn(rank) ? `rank ${rank} has nothing placed after ${spelled(free)}`
          : `rank ${rank} is done at ${spelled(free)}, the others at ${spelled(end)}`;
        found.push([rank, free, end, why]);
      }
    });
    return found;
  }

  criticalPath() {
    let span = null;
    for (const row of this.rows) if (row.length && (span === null || row.at(-1).end > span.end)) span = row.at(-1);
    const path = [];
    while (span !== null) {
      path.push(span.action);
      const here = span;
      const causes = this.needs(here.action).map((each) => [this.arrival(each, here.rank), this.maker.get(each.key)]);
      const row = this.rows[here.rank], index = row.indexOf(here);
      if (index) causes.push([row[index - 1].end, row[index - 1]]);
      span = null;
      let latest = -1;
      for (const [time, maker] of causes) {
        if (time > latest) [span, latest] = [maker, time];
      }
    }
    return path.reverse();
  }

  needs(action) {
    const parsed = parse(action);
    return wants(parsed, this.stages).map(([what, stage]) => (
      { what, stage, microbatch: parsed.microbatch, key: key(what, stage, parsed.microbatch) }));
  }

  arrival(product, rank) {
    const maker = this.maker.get(product.key);
    if (maker.rank === rank) return maker.end;
    return maker.end + this.game.transfers[product.what === "activation" ? product.stage : product.stage - 1];
  }

  refuseUnlessPossible(action) {
    const { stage, kind, microbatch } = parse(action);
    if (!this.kinds.includes(kind)) {
      const kinds = this.game.split ? "F, B, I and W" : "F and B";
      throw new Refused("unknown", `${action} is not for this board: it takes ${kinds}`);
    }
    if (stage >= this.stages || microbatch >= this.game.microbatches) {
      throw new Refused("unknown", `there is no ${action} here: stages are 0 to ${this.stages - 1}, microbatches 0 to ${this.game.microbatches - 1}`);
    }
    for (const product of provides({ stage, kind, microbatch })) {
      const placed = this.maker.get(product);
      if (placed) throw new Refused("placed", `${placed.action} is placed already, from ${spelled(placed.start)}`);
    }
    for (const product of this.needs(action)) {
      if (!this.maker.has(product.key)) {
        const kinds = product.what === "activation" ? ["F"] : this.game.split ? ["I", "B"] : ["B"];
        const makers = kinds.map((each) => `${product.stage}${each}${product.microbatch}`).join(" or ");
        const named = product.stage !== stage ? product.key : kind === "W" ? "its own input gradient" : "its own forward";
        throw new Refused("missing", `${action} needs ${named}: place ${makers} first`);
      }
    }
  }

  indexAt(rank, at) {
    const row = this.rows[rank];
    if (at === null) return row.length;
    for (const span of row) {
      if (span.start <= at && at < span.end) {
        throw new Refused("busy", `rank ${rank} is busy with ${span.action} from ${spelled(span.start)} to ${spelled(span.end)}: choose a time when it is free`);
      }
    }
    return row.filter((span) => span.start <= at).length;
  }

  fit(action, index) {
    const { stage, kind } = parse(action), rank = this.rankOf(action), row = this.rows[rank];
    const took = this.game.durations[kind][stage];
    let start = index ? row[index - 1].end : 0;
    for (const product of this.needs(action)) start = Math.max(start, this.arrival(product, rank));
    if (index < row.length && start + took > row[index].start) {
      throw new Refused("room", `${action} takes ${spelled(took)} and cannot start before ${spelled(start)} here, but ${row[index].action} starts at ${spelled(row[index].start)}: choose a longer gap`);
    }
    const limit = this.game.limits[rank];
    if (limit !== null && kind === "F") {
      const held = Math.max(...heldAfter([...row.slice(0, index), { action }, ...row.slice(index)]).slice(index));
      if (held > limit) {
        throw new Refused("memory", `with ${action}, rank ${rank} would hold ${held} activations and its cap is ${limit}: place a ${this.game.split ? "W or B" : "B"} first`);
      }
    }
    return start;
  }

  insert(action, index) {
    const start = this.fit(action, index), parsed = parse(action), rank = this.rankOf(action), row = this.rows[rank];
    const span = { rank, action, start, end: start + this.game.durations[parsed.kind][parsed.stage] };
    const isLast = index === row.length;
    row.splice(index, 0, span);
    for (const product of provides(parsed)) this.maker.set(product, span);
    return isLast ? null : index;
  }

  leftOn(rank) {
    const done = this.rows[rank].reduce((sum, span) => sum + provides(parse(span.action)).length, 0);
    return 3 * this.stagesOf[rank].length * this.game.microbatches - done;
  }

  whyWaits(span, free) {
    let latest = null;
    for (const product of this.needs(span.action)) {
      if (latest === null || this.arrival(product, span.rank) > this.arrival(latest, span.rank)) latest = product;
    }
    const maker = this.maker.get(latest.key);
    const waits = `rank ${span.rank} waits from ${spelled(free)} to ${spelled(span.start)} for ${latest.key}`;
    if (maker.end === span.start) return `${waits}: rank ${maker.rank} is busy with it until then`;
    return `${waits}: rank ${maker.rank} sent it at ${spelled(maker.end)}`;
  }
}

export function play(position, move) {
  if (move.startsWith("=")) { // this in place of all
    const { rows, maker } = replay(position.game, move.slice(1).split(".").filter(Boolean));
    Object.assign(position, { rows, maker });
    return;
  }
  const match = MOVE.exec(move);
  if (!match || (match[1] && match[3])) {
    throw new Refused("unknown", FORM);
  }
  const { stage, kind, microbatch } = parse(match[2]), action = `${stage}${kind}${microbatch}`;
  if (match[1]) position.remove(action);
  else if (match[3]) position.placeAt(action, Number(match[3]));
  else position.place(action);
}

export function replay(game, moves) {
  const position = new Position(game);
  for (const move of moves) play(position, move);
  return position;
}

// Why a policy, or a named order, has no next action; empty if the board is complete.
export function standstill(position, policy, references) {
  let candidates = [...Array(position.stages).keys()].flatMap((stage) =>
    [...Array(position.game.microbatches).keys()].map((microbatch) => `${stage}F${microbatch}`));
  if (policy in references) {
    const order = references[policy];
    for (const [rank, row] of position.rows.entries()) {
      for (const [i, { action }] of row.entries()) {
        if (action !== order[rank][i]) return `rank ${rank} has ${action} where ${policy} has ${order[rank][i]}`;
      }
    }
    candidates = order.flatMap((row, rank) => row.slice(position.rows[rank].length).slice(0, 1));
  }
  const refusals = candidates.map((action) => position.whyNot(action));
  const full = refusals.find((refused) => refused?.why === "memory"); // a stamp may stop for other reasons
  return (full ?? refusals.find((refused) => refused && refused.why !== "placed"))?.message ?? "";
}

export function advice(position, policy, references, rank = null) {
  const ranks = rank === null ? [...position.rows.keys()] : [rank];
  let best = null;
  for (const each of ranks) {
    const option = policy in references ? ofReference(position, references[policy], each) : ofPolicy(position, policy, each);
    if (option !== null && (best === null || less(option.rank, best.rank))) best = option;
  }
  return best && best.action;
}

export function fill(position, policy, references) {
  const moves = [];
  for (let action = advice(position, policy, references); action !== null; action = advice(position, policy, references)) {
    position.place(action);
    moves.push(action);
  }
  return moves;
}

// Place the next action of a policy, or of a named order: {action, strange}, what is to be said of it; null if there is none.
// Unless it `looks` ahead, it doesn't say what becomes ready before the action ends: that takes time on a large board.
export function step(position, policy, references, looks = true) {
  const action = advice(position, policy, references);
  if (action === null) return null;
  const rank = position.rankOf(action), row = position.rows[rank], { kind } = parse(action), isForward = kind === "F";
  const start = position.startOf(action), free = row.at(-1)?.end ?? 0, strange = [];
  const able = position.legal(rank), half = (each) => parse(each).kind.replace("B", "I");
  const sooner = able.find((each) => position.startOf(each) < start);
  // A forward against a backward: a W can always come later, and a whole B is no other choice than its I.
  const rivals = position.game.split ? "FI" : "FB";
  const isRival = (each) => rivals.includes(parse(each).kind) && half(each) !== half(action);
  const tied = able.find((each) => position.startOf(each) === start && isRival(each));
  const end = start + position.game.durations[kind][parse(action).stage], ahead = position.copy();
  for (let next = looks; next; ) { // what the other ranks do until then
    next = position.stagesOf.map((_, each) => each !== rank && advice(ahead, policy, references, each)).find((each) => each && ahead.startOf(each) < end);
    if (next) ahead.place(next);
  }
  const later = ahead.legal(rank).find((each) => isRival(each) && ahead.startOf(each) > start && ahead.startOf(each) < end);
  if (!isForward && row.every((span) => parse(span.action).kind === "F")) strange.push(`warm-up is over on rank ${rank}: ${action} is its first backward`);
  const most = Math.max(0, ...heldAfter(row)), limit = position.game.limits[rank];
  position.place(action);
  const held = heldAfter(row).at(-1), left = position.stagesOf[rank].length * position.game.microbatches;
  if (row.length > 1 && start > free) {
    strange.push(`${sooner ? `idle though ${sooner} could start sooner` : "forced to idle"}: ${position.whyWaits(row.at(-1), free)}`);
  }
  if (isForward && held === limit && most < limit) strange.push(`cap reached: rank ${rank} holds ${held} of ${limit}`);
  if (isForward && row.filter((span) => parse(span.action).kind === "F").length === left) strange.push(`drain begins on rank ${rank}: ${action} is its last forward`);
  if (tied) strange.push(`a tie: ${tied} could start at ${spelled(start)} too`);
  if (later) strange.push(`${later} could start at ${spelled(ahead.startOf(later))}, while ${action} runs to ${spelled(end)}`);
  return { action, strange };
}

// Each rank's row with its last cycle once more: what it did since it last did the same for an earlier microbatch, or for
// the one so `many` earlier.
export function stamped(position, many = 0) {
  return position.rows.map((row) => {
    const actions = row.map((span) => parse(span.action)), last = actions.at(-1);
    const before = actions.slice(0, -1).findLastIndex((each) =>
      each.kind === last.kind && each.stage === last.stage && (!many || each.microbatch === last.microbatch - many));
    const shift = before < 0 ? 0 : last.microbatch - actions[before].microbatch;
    const again = shift > 0 ? actions.slice(before + 1) : [];
    return [...row.map((span) => span.action), ...again.map(({ stage, kind, microbatch }) => ({ stage, kind, microbatch: microbatch + shift }))
      .filter(({ microbatch }) => microbatch < position.game.microbatches).map(({ stage, kind, microbatch }) => `${stage}${kind}${microbatch}`)];
  });
}

export function recognised(position, references) {
  if (!position.spans.length) return [];
  return Object.keys(references).filter((name) => follows(position, references[name]));
}

export function follows(position, order) {
  return position.rows.every((row, rank) => row.every((span, i) => span.action === order[rank][i]));
}

function ofReference(position, order, rank) {
  const action = order[rank][position.rows[rank].length];
  if (action === undefined || !follows(position, order)) return null;
  return position.whyNot(action) === null ? { rank: [position.startOf(action), 0, rank], action } : null;
}

function ofPolicy(position, policy, rank) {
  const { split } = position.game;
  let best = null;
  for (const action of position.legal(rank)) {
    const { stage, kind, microbatch } = parse(action);
    if (split && kind === "B" && policy === "zero bubble") continue;
    // A W belongs to an I that was placed before: by whichever policy, it has to be done.
    if (split && kind === "I" && policy !== "zero bubble") continue;
    if (policy === "backward first" && kind === "F" && position.inFlight(stage) >= position.stages - stage) continue;
    const order = [position.startOf(action), POLICIES[policy].indexOf(kind), microbatch, -stage, rank];
    if (best === null || less(order, best.rank)) best = { rank: order, action };
  }
  return best;
}

// Whether the caps let every microbatch come back, of which each has done so many steps down and up. One that has room to go on
// to the end frees all that it holds, and any other only takes room meanwhile: so if none can, no order can.
function leads({ placement, limits }, steps) {
  const turn = 2 * placement.length, count = (is) => limits.map((_, rank) => placement.filter((home, stage) => home === rank && is(stage)).length);
  const flying = steps.map((step) => ({ holds: count((stage) => stage < step && stage < turn - step), takes: count((stage) => stage >= step) }));
  while (flying.length) {
    const held = limits.map((_, rank) => flying.reduce((sum, { holds }) => sum + holds[rank], 0));
    const next = flying.findIndex(({ takes }) => limits.every((limit, rank) => limit === null || held[rank] + takes[rank] <= limit));
    if (next < 0) return false;
    flying.splice(next, 1);
  }
  return true;
}

// The best that a position can still become: {end, order}, `sure` if nothing is better; `first`, an action and its time, if
// that must go into a gap. Branch and bound: what another action could be done before the start of is not tried (Giffler
// and Thompson 1960), but for a forward, which may wait for room. It takes `effort.left` steps at most.
export function best(position, target, effort = { left: 10000 }) {
  const { game } = position, { placement, limits, split, durations, transfers } = game, steps = 2 * position.stages, tiny = 1e-9;
  // A microbatch goes down all stages and comes back: for each step its stage, its rank and times.
  const way = [...Array(steps).keys()].map((step) => {
    const isDown = step < position.stages, stage = isDown ? step : steps - 1 - step, kind = isDown ? "F" : split ? "I" : "B";
    return { step, stage, kind, rank: placement[stage], took: durations[kind][stage], half: kind === "I" ? durations.W[stage] : 0 };
  });
  const tails = Array(steps + 1).fill(0), seen = new Set();
  for (const each of [...way].reverse()) {
    const next = way[each.step + 1];
    each.hop = each.took + (next && next.rank !== each.rank ? transfers[Math.min(each.stage, next.stage)] : 0);
    tails[each.step] = Math.max(each.hop + tails[each.step + 1], each.took + each.half);
  }
  const after = limits.map((_, rank) => (split ? 0 : Math.min(...way.filter((each) => each.kind === "B" && each.rank === rank)
    .map((each) => tails[each.step] - each.took))));
  let found = null, limit = Infinity;

  // No order from here ends before this: no microbatch's way does, and no rank's work.
  const least = ({ free, halves, flying }) => {
    const work = free.map(() => 0), heads = free.map(() => Infinity);
    let end = Math.max(...free);
    halves.forEach((waiting, stage) => {
      if (!waiting.length) return;
      work[placement[stage]] += waiting.length * durations.W[stage];
      heads[placement[stage]] = free[placement[stage]];
    });
    for (const { step, from } of flying) {
      let at = from;
      for (const { step: each, rank, took, half, hop } of way.slice(step)) {
        at = Math.max(at, free[rank]);
        end = Math.max(end, at + tails[each]);
        heads[rank] = Math.min(heads[rank], at);
        work[rank] += took + half;
        at += hop;
      }
    }
    return Math.max(end, ...work.map((each, rank) => (each ? heads[rank] + each + after[rank] : 0)));
  };
  const search = (state) => {
    effort.left -= 1;
    const { free, held, halves, flying, waits, path } = state;
    if (effort.left < 0 || limit <= target + tiny || least(state) > limit - tiny) return;
    const able = halves.flatMap((waiting, stage) => (waiting.length
      ? [{ stage, kind: "W", rank: placement[stage], i: waiting[0], start: free[placement[stage]], took: durations.W[stage] }] : []));
    for (const each of way) {
      const { step, kind, rank, stage } = each, ready = flying.filter((one) => one.step === step).sort((a, b) => a.from - b.from);
      if (!ready.length) continue;
      const isOut = () => waits[stage] || held[rank] === limits[rank] || !leads(game, flying.map((one) => one.step + (one === ready[0])));
      if (kind === "F" && isOut()) continue;
      able.push({ ...each, i: ready[0].i, start: Math.max(free[rank], ready[0].from) });
    }
    if (!able.length && flying.every(({ step }) => step === steps)) [found, limit] = [path, Math.max(...free)];
    const key = JSON.stringify([free, held, halves.map((each) => each.length), waits, flying.map(({ step, from }) => [step, from]).sort()]);
    if (!able.length || seen.has(key)) return;
    seen.add(key);
    const soonest = able.reduce((a, b) => (b.start + b.took < a.start + a.took - tiny ? b : a)), { rank, stage, kind } = soonest;
    const mayWait = kind === "F" && limits[rank] !== null;
    const rivals = able.filter((each) => each.rank === rank && each.start < soonest.start + soonest.took - tiny);
    for (const each of mayWait ? [soonest] : rivals.sort((a, b) => a.start - b.start || "IBFW".indexOf(a.kind) - "IBFW".indexOf(b.kind))) {
      const more = halves.map((waiting) => [...waiting]);
      if (each.kind === "W") more[each.stage].shift();
      if (each.kind === "I") more[each.stage].push(each.i);
      search({
        free: free.with(rank, each.start + each.took), held: held.with(rank, held[rank] + { F: 1, I: 0, B: -1, W: -1 }[each.kind]), halves: more,
        flying: each.kind === "W" ? flying : flying.with(each.i, { i: each.i, step: each.step + 1, from: each.start + each.hop }),
        waits: waits.map((is, other) => is && placement[other] !== rank), path: [...path, [rank, `${each.stage}${each.kind}${each.i}`]],
      });
    }
    if (mayWait) search({ ...state, waits: waits.with(stage, true) });
  };

  const start = {
    free: position.rows.map((row) => row.at(-1)?.end ?? 0), held: position.rows.map((row) => heldAfter(row).at(-1) ?? 0), path: [],
    halves: placement.map((_, stage) => position.steps.flatMap((step, i) => (
      step >= steps - stage && !position.maker.has(key("weight gradient", stage, i)) ? [i] : []))),
    waits: placement.map(() => false),
    flying: position.steps.map((step, i) => {
      const next = way[step], wanted = next ? position.needs(`${next.stage}${next.kind}${i}`) : [];
      return { i, step, from: Math.max(0, ...wanted.map((each) => position.arrival(each, next.rank))) };
    }),
  };
  search(start);
  if (!found) return { end: Infinity, sure: false };
  let result = { end: limit, order: position.rows.map((row) => row.map((span) => span.action)) };
  for (const [rank, action] of found) result.order[rank].push(action);
  for (const [rank, from] of result.end > target + tiny ? position.gaps() : []) {
    for (const action of effort.left > 0 ? position.legal(rank, from) : []) {
      const copy = position.copy();
      if (copy.place(action, from) === null) continue;
      const other = best(copy, target, effort);
      if (other.end < result.end) result = { ...other, first: [action, from] };
    }
  }
  return { ...result, sure: effort.left >= 0 };
}
