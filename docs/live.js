// Boards and the explorer on pages that no kernel answers. Above stand board_rules.js, board.js and player.js.

function stored(name, is) {
  try {
    const found = JSON.parse(localStorage.getItem(`course_pp ${name}`) ?? "[]");
    return Array.isArray(found) && found.every(is) ? found : [];
  } catch {
    return [];
  }
}

function store(name, value) {
  try { localStorage.setItem(`course_pp ${name}`, JSON.stringify(value)); } catch { /* nothing is kept */ }
}

// What a kernel would hold: a level of LEVELS, or a board of its own. What was placed outlives the page, where the browser
// allows it. Where the board is the page's only one, the address says the position.
class Board {
  constructor(level, own, root, addressed) {
    Object.assign(this, { own, addressed, isLink: false });
    this.take(level);
    this.view = new View(this, root);
    if (!addressed) return;
    window.addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  take(chosen) {
    const data = chosen ? LEVELS[chosen - 1] : this.own, moves = stored(data.name, (move) => typeof move === "string");
    let placed = 0;
    try { placed = replay(data.game, moves).spans.length; } catch { /* the view leaves out what is illegal */ }
    const said = placed ? "From last time; clear the board to begin anew." : "";
    this.state = { ...data, words: { ...data.words, said }, chosen, moves, undone: [], ran: null, done: stored("done", Number.isInteger) };
  }

  get(key) {
    return this.state[key];
  }

  set(key, value) {
    if (key === "chosen") {
      this.take(value);
      this.view.open();
      this.address();
    } else this.state[key] = value;
    if (key === "done") {
      this.state.done = [...new Set([...stored("done", Number.isInteger), ...value])];
      store("done", this.state.done);
      this.view.drawLevels();
    }
  }

  save_changes() {
    if (!this.isLink) store(this.state.name, this.state.moves); // looking at another's position loses none of one's own
    this.isLink = false;
    this.address();
  }

  address() {
    if (this.addressed) history.replaceState(null, "", `#${this.view.written()}`);
  }

  follow() {
    const given = new URLSearchParams(location.hash.slice(1)), level = Number(given.get("level"));
    if (!given.has("level") && !given.has("moves")) return; // a heading's
    const link = location.hash; // opening a level changes it
    if (LEVELS[level - 1] && level !== this.view.number) this.set("chosen", level);
    if (LEVELS[level - 1] && !given.has("moves")) return;
    this.isLink = true;
    this.view.load(link, "; your own position is shown");
    this.isLink = false;
  }
}

const TIMES = [["forward", "forward f", 1], ["input", "input gradient b", 1], ["weight", "weight gradient w", 1],
  ["latency", "latency L", 0], ["slowdown", "times slower", 2]];
let drawn = 0;

class Explorer {
  constructor(data, root) {
    this.data = data;
    root.replaceChildren();
    root.classList.add("cpp-explorer");
    const form = html(root, "div", { className: "cpp-controls" });
    this.controls = {};
    const menu = (name, label, options, value) => {
      const box = html(form, "label", { textContent: label });
      const node = html(box, "select", { name });
      for (const [each, text] of options) html(node, "option", { value: each, textContent: text });
      node.value = value;
      node.addEventListener("change", () => this.update());
      this.controls[name] = node;
    };
    const same = (values) => values.map((each) => [each, each]);
    menu("schedule", "schedule", same(Object.keys(data.orders)), "1f1b");
    menu("ranks", "ranks p", same(data.ranks), 4);
    menu("microbatches", "microbatches m", same(data.microbatches), 8);
    menu("slow", "slow stage", [[-1, "none"], ...same([...Array(2 * Math.max(...data.ranks)).keys()])], -1);
    for (const [name, text, value] of TIMES) {
      const box = html(form, "label", { textContent: text });
      const least = name === "latency" ? 0 : name === "slowdown" ? 1 : 0.25;
      const node = html(box, "input", { type: "range", name, min: least, max: 4, step: 0.25, value });
      html(box, "output", { textContent: value });
      node.addEventListener("input", () => this.update());
      this.controls[name] = node;
    }
    this.said = html(root, "p", { className: "cpp-said" }, { "aria-live": "polite" });
    this.chart = html(root, "div");
    this.numbers = html(root, "div", { className: "cpp-numbers" });
    this.gaps = html(html(root, "label", { textContent: "why idle:" }), "select", { name: "gap" });
    this.gaps.addEventListener("change", () => this.why());
    this.cause = html(root, "p", { className: "cpp-cause" }, { "aria-live": "polite" });
    this.update();
  }

  value(name) {
    return Number(this.controls[name].value);
  }

  update() {
    for (const [name] of TIMES) this.controls[name].nextElementSibling.textContent = this.value(name).toFixed(2);
    const name = this.controls.schedule.value, p = this.value("ranks"), m = this.value("microbatches");
    const found = this.data.orders[name][`${p} ${m}`], slow = this.value("slow");
    const refused = typeof found === "string" ? found
      : slow >= found.placement.length ? `slow stage ${slow}: there are stages 0 to ${found.placement.length - 1}; choose one of them, or none` : "";
    this.said.textContent = refused && `${refused}.`;
    for (const part of [this.chart, this.numbers]) part.replaceChildren();
    this.position = refused ? null : this.placed(found, m, slow);
    this.list();
    if (!refused) this.show(name, p, m);
  }

  placed({ placement, order }, m, slow) {
    const each = (time) => placement.map((_, stage) => (stage === slow ? time * this.value("slowdown") : time));
    const [f, i, w] = ["forward", "input", "weight"].map((name) => each(this.value(name)));
    const rows = order.map((row) => row.split(" "));
    const game = { placement, microbatches: m, split: rows.flat().some((action) => action.includes("I")),
      durations: { F: f, I: i, W: w, B: i.map((time, stage) => time + w[stage]) },
      transfers: placement.slice(1).map((rank, stage) => (rank === placement[stage] ? 0 : this.value("latency"))),
      limits: rows.map(() => null) };
    const position = new Position(game);
    fill(position, "it", { it: rows });
    return position;
  }

  show(name, p, m) {
    const { position } = this, end = position.makespan;
    const busy = position.rows.map((row) => row.reduce((sum, span) => sum + span.end - span.start, 0));
    const idle = 1 - busy.reduce((a, b) => a + b, 0) / (p * end);
    const longest = Math.max(...position.rows.map((row) => row.at(-1).end - row[0].start));
    const percent = (share) => `${Number(Number((100 * share).toFixed(6)).toPrecision(3))} %`;
    const title = `${name}, ${p} ranks, ${m} microbatches: ${spelled(end)} units, ranks idle for ${percent(idle)}`;
    drawn += 1;
    const root = html(this.chart, "div", { className: "cpp-player" },
      { "data-player": `cpp-live-${drawn}`, role: "group", "aria-label": `timeline that moves: ${title}` });
    PLAYER(root.dataset.player, timelineOf(position, title, this.data.looks));
    const cursor = root.querySelector("input"); // at the end, where nothing is veiled
    cursor.value = cursor.max;
    cursor.dispatchEvent(new Event("input"));
    table(this.numbers, ["", "simulated"], [["makespan", spelled(end)], ["bubble b, of all rank time", percent(idle)],
      ["b / (1 − b), of the work", percent(idle / (1 - idle))],
      ["bubble, of the longest span", percent((longest - Math.max(...busy)) / longest)]]);
    table(this.numbers, ["rank", "busy", "peak held"],
      position.peaks.map((peak, rank) => [String(rank), percent(busy[rank] / end), String(peak)]));
  }

  list() {
    const gaps = this.position?.gaps() ?? [];
    this.gaps.replaceChildren();
    gaps.forEach(([rank, start, end], i) =>
      html(this.gaps, "option", { value: i, textContent: `rank ${rank}, ${spelled(start)} to ${spelled(end)}` }));
    this.gaps.disabled = !gaps.length;
    const widths = gaps.map(([, start, end]) => end - start);
    if (gaps.length) this.gaps.value = widths.indexOf(Math.max(...widths));
    this.why();
  }

  why() {
    const gap = this.position?.gaps()[Number(this.gaps.value)];
    this.cause.textContent = !this.position ? "" : gap && !this.gaps.disabled ? `${gap[3]}.` : "No rank is ever idle.";
  }
}

function table(parent, head, rows) {
  const node = html(parent, "table"), line = html(html(node, "thead"), "tr"), body = html(node, "tbody");
  for (const text of head) html(line, "th", { textContent: text, scope: "col" });
  for (const row of rows) {
    const cells = html(body, "tr");
    for (const text of row) html(cells, "td", { textContent: text });
  }
}

// What player.py writes of a timeline.
function timelineOf(position, title, looks) {
  const several = position.stagesOf.some((stages) => stages.length > 1), spans = [], held = [], messages = [], at = {};
  position.rows.forEach((row, rank) => row.forEach((span) => {
    const { stage, kind, microbatch } = parse(span.action);
    at[`${kind} ${stage} ${microbatch}`] = span;
    spans.push({ rank, start: span.start, end: span.end,
      parts: [{ kind, name: `${several ? stage : ""}${kind}${microbatch}`, short: String(microbatch) }] });
  }));
  const of = (kinds, stage, microbatch) => kinds.map((kind) => at[`${kind} ${stage} ${microbatch}`]).find(Boolean);
  position.stagesOf.forEach((stages, rank) => stages.forEach((stage) => {
    for (let i = 0; i < position.game.microbatches; i += 1) {
      held.push({ rank, start: of(["F"], stage, i).start, end: of(["B", "W"], stage, i).end, name: several ? `${stage}·${i}` : String(i) });
      for (const [what, to, kinds] of [["activation", stage + 1, ["F"]], ["gradient", stage - 1, ["B", "I"]]]) {
        const home = position.game.placement[to];
        if (home === undefined || home === rank) continue;
        const sent = of(kinds, stage, i).end;
        messages.push({ from: rank, to: home, sent, there: sent + position.game.transfers[Math.min(stage, to)],
          taken: of(kinds, to, i).start, what, forward: what === "activation", microbatch: i });
      }
    }
  }));
  const events = [...new Set([0, ...spans.flatMap(({ start, end }) => [start, end])])].sort((a, b) => a - b);
  const end = position.makespan;
  return { title, alt: title, ranks: position.ranks, end, scale: 1, unit: "", digits: end >= 10 ? 1 : 2, looks, events, spans, held, messages };
}

window.coursePp = {
  board: (id, { level, addressed, ...own }) => {
    const root = document.getElementById(id), done = stored("done", Number.isInteger);
    root.replaceChildren();
    const next = LEVELS.findIndex((_, i) => !done.includes(i + 1)) + 1;
    new Board(addressed ? next || 1 : level, own, html(root, "div"), addressed);
  },
  explorer: (id, data) => new Explorer(data, document.getElementById(id)),
};
