// The rules of the board, as board_rules.py has them, for where no Python runs; a test holds the two against each other.
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

  // Whether the caps let every microbatch come back, after `also` too. One that has room to go on to the end frees all
  // that it holds, and any other only takes room meanwhile: so if none can, no order can.
  finishes(also = null) {
    const held = this.game.limits.map(() => 0), made = (what, stage, i) => this.maker.has(key(what, stage, i));
    const flying = Array.from({ length: this.game.microbatches }, (_, i) => {
      const holds = this.game.limits.map(() => 0), takes = this.game.limits.map(() => 0);
      this.game.placement.forEach((rank, stage) => {
        if (!made("activation", stage, i) && also !== `${stage}F${i}`) takes[rank] += 1;
        else if (!made("gradient", stage, i)) holds[rank] += 1;
      });
      holds.forEach((count, rank) => { held[rank] += count; });
      return { holds, takes };
    });
    for (;;) {
      const next = flying.findIndex(({ takes }) => takes.every((more, rank) => held[rank] + more <= (this.game.limits[rank] ?? Infinity)));
      if (next < 0) return !flying.length;
      flying.splice(next, 1)[0].holds.forEach((count, rank) => { held[rank] -= count; });
    }
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
    if (maker.end === span.start) return `${waits}: rank ${maker.rank} makes it until then`;
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
export function step(position, policy, references) {
  const action = advice(position, policy, references);
  if (action === null) return null;
  const rank = position.rankOf(action), row = position.rows[rank], { kind } = parse(action), isForward = kind === "F";
  const start = position.startOf(action), free = row.at(-1)?.end ?? 0, strange = [];
  const able = position.legal(rank), half = (each) => parse(each).kind.replace("B", "I");
  const sooner = able.find((each) => position.startOf(each) < start);
  // A forward against a backward: a W can always come later, and a whole B is no other choice than its I.
  const rivals = position.game.split ? "FI" : "FB";
  const tied = able.find((each) => position.startOf(each) === start && rivals.includes(parse(each).kind) && half(each) !== half(action));
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
  const { split } = position.game, isOpen = position.finishes();
  let best = null;
  for (const action of position.legal(rank)) {
    const { stage, kind, microbatch } = parse(action);
    if (split && kind === "B" && policy === "zero bubble") continue;
    // A W belongs to an I that was placed before: by whichever policy, it has to be done.
    if (split && kind === "I" && policy !== "zero bubble") continue;
    if (policy === "backward first" && kind === "F" && position.inFlight(stage) >= position.stages - stage) continue;
    const order = [position.startOf(action), POLICIES[policy].indexOf(kind), microbatch, -stage, rank];
    if (best !== null && !less(order, best.rank)) continue;
    if (kind === "F" && isOpen && !position.finishes(action)) continue; // the caps would then stop all
    best = { rank: order, action };
  }
  return best;
}

// The best that a position can still become: {end, order}, `sure` if nothing is better, `first` = [action, time] if that
// goes into a gap. It tries orders in which no rank waits for what starts only when another could have been done by then
// (Giffler and Thompson 1960), unless the cap makes a forward wait; up to so `many`, so it may miss the best.
export function best(position, target, references, effort = { left: 20000 }) {
  const { game, stages } = position, { placement, limits, split } = game, steps = 2 * stages, tiny = 1e-9;
  const stageOf = (step) => (step < stages ? step : steps - 1 - step), home = (step) => placement[stageOf(step)];
  const kindOf = (step) => (step < stages ? "F" : split ? "I" : "B"), time = (step) => game.durations[kindOf(step)][stageOf(step)];
  const later = (stage) => (split ? game.durations.W[stage] : 0);
  // From the start of a step to that of the next, and to the end of all that follows.
  const hops = [...Array(steps).keys()].map((step) => time(step) + (step + 1 === steps || home(step) === home(step + 1) ? 0
    : game.transfers[Math.min(stageOf(step), stageOf(step + 1))]));
  const tails = Array(steps + 1).fill(0);
  for (let step = steps - 1; step >= 0; step -= 1) {
    tails[step] = Math.max(hops[step] + tails[step + 1], time(step) + (step < stages ? 0 : later(stageOf(step))));
  }
  const after = limits.map((_, rank) => (split ? 0 : Math.min(...position.stagesOf[rank].map((stage) => {
    const step = steps - 1 - stage;
    return tails[step] - time(step);
  }))));
  const free = position.rows.map((row) => row.at(-1)?.end ?? 0), held = position.rows.map((row) => heldAfter(row).at(-1) ?? 0);
  const rest = limits.map(() => 0), halves = placement.map(() => []), banned = placement.map(() => false), path = [];
  const flying = Array.from({ length: game.microbatches }, (_, i) => {
    let step = 0;
    const made = (what, stage) => position.maker.has(key(what, stage, i));
    while (step < steps && made(step < stages ? "activation" : "gradient", stageOf(step))) step += 1;
    for (let each = step; each < steps; each += 1) rest[home(each)] += time(each) + (each < stages ? 0 : later(stageOf(each)));
    placement.forEach((rank, stage) => {
      if (!made("gradient", stage) || made("weight gradient", stage)) return;
      halves[stage].push(i);
      rest[rank] += later(stage);
    });
    const wanted = step < steps ? position.needs(`${stageOf(step)}${kindOf(step)}${i}`) : [];
    return { step, from: Math.max(0, ...wanted.map((each) => position.arrival(each, home(step)))) };
  });
  let found = null, limit = target + 2 * tiny, seen = new Set();

  const least = () => {
    const heads = rest.map(() => Infinity);
    let end = 0;
    halves.forEach((waiting, stage) => { if (waiting.length) heads[placement[stage]] = free[placement[stage]]; });
    for (const { step, from } of flying) {
      for (let each = step, at = from; each < steps; each += 1) {
        at = Math.max(at, free[home(each)]);
        heads[home(each)] = Math.min(heads[home(each)], at);
        end = Math.max(end, at + tails[each]);
        at += hops[each];
      }
    }
    rest.forEach((work, rank) => { end = Math.max(end, work > tiny ? heads[rank] + work + (after[rank]) : free[rank]); });
    return end;
  };
  const options = () => {
    const able = [];
    placement.forEach((rank, stage) => {
      if (halves[stage].length) able.push({ rank, stage, kind: "W", i: halves[stage][0], start: free[rank], took: later(stage) });
      for (const step of [stage, steps - 1 - stage]) {
        if (step < stages && (banned[stage] || held[rank] >= (limits[rank] ?? Infinity))) continue;
        let i = -1;
        flying.forEach((each, other) => { if (each.step === step && (i < 0 || each.from < flying[i].from)) i = other; });
        if (i >= 0) able.push({ rank, stage, kind: kindOf(step), i, start: Math.max(free[rank], flying[i].from), took: time(step) });
      }
    });
    return able;
  };
  const go = () => {
    effort.left -= 1;
    if (effort.left < 0 || least() > limit - tiny) return;
    const able = options();
    if (!able.length) {
      if (flying.every(({ step }) => step === steps)) [found, limit] = [[...path], Math.max(...free)];
      return;
    }
    const state = [free, held, halves.map((each) => each.length), banned.map(Number), flying.map(({ step, from }) => `${step}@${from}`).sort()].join("|");
    if (seen.has(state)) return;
    seen.add(state);
    const soonest = able.reduce((a, b) => (b.start + b.took < a.start + a.took - tiny ? b : a)), { rank, stage, kind } = soonest;
    const capped = kind === "F" && limits[rank] !== null;
    const tried = capped ? [soonest] : able.filter((each) => each.rank === rank && each.start < soonest.start + soonest.took - tiny);
    for (const each of tried.sort((a, b) => a.start - b.start || "IBFW".indexOf(a.kind) - "IBFW".indexOf(b.kind))) {
      place(each);
      if (found && limit <= target + tiny) return;
    }
    if (!capped) return;
    banned[stage] = true; // it waits for another of its rank
    go();
    banned[stage] = false;
  };
  const place = ({ rank, stage, kind, i, start, took }) => {
    const was = { free: free[rank], rest: rest[rank], held: held[rank], banned: [...banned], ...flying[i] }, waiting = [...halves[stage]];
    free[rank] = start + took;
    rest[rank] -= took;
    held[rank] += kind === "F" ? 1 : kind === "I" ? 0 : -1;
    for (const each of position.stagesOf[rank]) banned[each] = false;
    if (kind === "W") halves[stage].shift();
    else flying[i] = { step: was.step + 1, from: start + hops[was.step] };
    if (kind === "I") halves[stage].push(i);
    path.push([rank, `${stage}${kind}${i}`]);
    go();
    path.pop();
    [free[rank], rest[rank], held[rank], flying[i], halves[stage]] = [was.free, was.rest, was.held, { step: was.step, from: was.from }, waiting];
    was.banned.forEach((each, other) => { banned[other] = each; });
  };

  go();
  const ordered = (of) => of.rows.map((row) => row.map((span) => span.action));
  let result = { end: Infinity, order: null, sure: effort.left >= 0 };
  if (!found) {
    for (const policy of [...Object.keys(POLICIES), ...Object.keys(references)]) {
      const copy = position.copy();
      fill(copy, policy, references);
      if (!copy.left && copy.makespan < result.end) result = { ...result, end: copy.makespan, order: ordered(copy) };
    }
    seen = new Set();
    limit = result.end;
    go();
    result.sure = effort.left >= 0;
  }
  if (found) {
    const order = ordered(position);
    for (const [rank, action] of found) order[rank].push(action);
    Object.assign(result, { end: limit, order });
  }
  for (const [rank, from] of result.end > target + tiny ? position.gaps() : []) {
    for (const action of position.legal(rank, from)) {
      const copy = position.copy();
      if (copy.place(action, from) === null) continue;
      const other = best(copy, target, references, effort);
      if (other.end < result.end) result = { ...other, first: [action, from] };
    }
  }
  return result;
}
