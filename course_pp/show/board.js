// The board in the browser. The rules stand above, from board_rules.js; here they are drawn and played by mouse and keys.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 74, RIGHT = 70, TOP = 36, WIDTH = 976, BOX = 28, STRIP = 9, GAP = 16;
const COLOURS = { F: "#56B4E9", B: "#D55E00", I: "#E69F00", W: "#009E73" };
const STROKES = { I: "M2 2h2v2h-2z", W: "M0 6L6 0" };
const WORDS = { F: "forward", B: "full backward", I: "input gradient", W: "weight gradient" };
const HELP = "Keys: ↑ ↓ choose a rank, ← → a time, Home and End its ends; f b i w place the first that is legal, 1 to 9 the " +
  "numbered ones; n takes one step of the policy, or opens the next level after par, s runs it until something is " +
  "strange (a tie, a wait or what may be worth one, a full cap, a new phase), t stamps the last cycle again; u undoes, " +
  "y redoes, Delete takes away, h hints, and hints more, c shows the critical path, p or Space plays";
const SHOWN = ["nothing", "what is ready", "what each choice leads to"];

// What is on the board after these moves, as a text: a load or a clear, "=0F0.1F0" or "=", is one of them, so it can be undone.
const flat = (moves) => moves.slice(Math.max(0, moves.findLastIndex((move) => move.startsWith("=")))).join(".").replace(/^=\.?/, "");
const named = (move) => (move === "=" ? "clearing the board" : move.startsWith("=") ? "loading a position" : move);

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.appendChild(node);
  return node;
}

function html(parent, tag, properties = {}, attributes = {}) {
  const node = Object.assign(document.createElement(tag), properties);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  parent.appendChild(node);
  return node;
}

class View {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    // A notebook loads this script once for each board, so a count would repeat.
    this.id = `cpp-board-${Math.random().toString(36).slice(2)}`;
    this.kernel = typeof model.send === "function"; // on a page of the site nobody would answer
    root.addEventListener("keydown", (event) => this.key(event));
    root.addEventListener("paste", (event) => {
      if (event.target.tagName !== "INPUT") this.load(event.clipboardData.getData("text"));
    });
    this.shown = SHOWN[1];
    this.open();
  }

  open() {
    const { model } = this;
    this.game = model.get("game");
    this.words = model.get("words");
    this.references = this.words.references;
    const { placement, microbatches } = this.game;
    this.number = model.get("chosen"); // 0 if this is no level
    this.head = this.number ? `level=${this.number}` : `stages=${placement.join(".")}&microbatches=${microbatches}`;
    this.rank = 0;
    this.at = null; // the end of the row
    this.simple = this.game.split ? "zero bubble" : "backward first";
    this.path = false;
    this.versus = "";
    this.time = null;
    const times = Object.values(this.game.durations).flat().concat(this.game.transfers.filter((each) => each > 0));
    this.step = Math.min(...times);
    const focused = this.root.contains(document.activeElement);
    this.build();
    this.read();
    if (focused) this.root.focus();
    this.say(this.words.said || "Choose a rank and place its first action.");
  }

  build() {
    const { root, words } = this;
    root.replaceChildren();
    root.classList.add("cpp-board");
    for (const [name, value] of Object.entries({
      role: "application", tabindex: 0, "aria-label": `Schedule board. ${words.title}`, "aria-roledescription": "schedule board",
      "aria-describedby": `${this.id}-keys`, "data-lm-suppress-shortcuts": "true",
    })) root.setAttribute(name, value);
    this.levels = html(root, "div", { className: "cpp-bar" }, { role: "group", "aria-label": "levels" });
    this.drawLevels();
    html(root, "h3", { textContent: words.title });
    html(root, "p", { textContent: words.story });
    this.facts = html(root, "div", { className: "cpp-facts" });
    const scrolls = html(root, "div", { className: "cpp-chart" }, { role: "group", "aria-label": "chart, scrolls sideways", tabindex: 0 });
    scrolls.addEventListener("scroll", () => this.keepNames());
    this.chart = svg(scrolls, "svg", { role: "img" });
    this.chart.addEventListener("click", (event) => this.click(event));
    this.chart.addEventListener("dblclick", (event) => this.click(event, true));
    this.palette = html(root, "div", { className: "cpp-bar" }, { role: "group", "aria-label": "what can be placed" });
    const bar = html(root, "div", { className: "cpp-bar" }, { role: "group", "aria-label": "tools" });
    const button = (text, label, does, parent = bar) => {
      const node = html(parent, "button", { type: "button", textContent: text }, { "aria-label": label });
      node.addEventListener("click", does);
      return node;
    };
    this.buttons = {
      undo: button("↶ undo", "undo, key u", () => this.undo()),
      redo: button("↷ redo", "redo, key y", () => this.redo()),
      hint: button("hint", "hint, key h", () => this.hint()),
    };
    const goes = html(root, "div", { className: "cpp-bar" }, { role: "group", "aria-label": "a policy that goes on" });
    this.policy = this.menu(goes, "who goes on", [...Object.keys(POLICIES), ...Object.keys(this.references)]);
    this.policy.value = this.simple;
    this.policy.addEventListener("change", () => this.root.focus()); // so that n and s are keys of the board again
    button("one step", "one step of the chosen policy, key n", () => this.go(1), goes);
    button("until strange", "run the chosen policy until something is strange, key s", () => this.go(Infinity, true), goes);
    button("fill the rest", "fill the rest by the chosen policy", () => this.go(Infinity), goes);
    button("stamp", "repeat each rank's last cycle for the next microbatches, key t", () => this.go(Infinity, false, "the stamp"), goes);
    this.every = html(html(goes, "label", { textContent: "every " }), "input", { type: "number", className: "cpp-every", min: 1, placeholder: "last" },
      { "aria-label": "microbatches from one stamp to the next; the last cycle's if empty" });
    this.buttons.path = button("critical path", "critical path, key c", () => this.togglePath());
    this.buttons.play = button("▶ play", "play, key p", () => this.togglePlay());
    this.other = this.menu(bar, "compare with", ["compare with …", ...Object.keys(this.references)]);
    this.other.addEventListener("change", () => {
      this.versus = this.other.value in this.references ? this.other.value : "";
      this.draw();
      if (this.versus) this.say(`Compared: ${this.compared()}.`);
    });
    if (this.kernel) this.buttons.run = button("run on ranks", "run on real ranks, key r", () => this.run());
    button("clear", "clear the board", () => {
      [this.rank, this.at] = [0, null];
      if (this.position.spans.length) this.commit([...this.moves, "="], [], "The board is empty; u brings the moves back.");
    });
    const settings = html(root, "div", { className: "cpp-bar" });
    const shown = this.menu(html(settings, "label", { textContent: "before a move, show " }), "shown before a move", SHOWN);
    shown.value = this.shown;
    shown.addEventListener("change", () => {
      this.shown = shown.value;
      this.draw();
    });
    this.text = html(html(settings, "label", { textContent: "position ", className: "cpp-position" }), "input", { type: "text", spellcheck: false },
      { "aria-label": "position as text, to copy; paste another and press Enter" });
    this.text.addEventListener("focus", () => this.text.select());
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.text.value = this.written();
      else if (event.key !== "Enter") return;
      else this.load(this.text.value);
      event.preventDefault(); // JupyterLab takes an Enter's own effect, a change, away
      this.root.focus();
    });
    this.text.addEventListener("change", () => {
      if (this.text.value !== this.written()) this.load(this.text.value);
    });
    this.now = html(root, "div", { className: "cpp-now" }, { "aria-live": "polite" });
    html(root, "div", { className: "cpp-keys", id: `${this.id}-keys`, textContent: this.kernel ? `${HELP}, r runs it on ranks.` : `${HELP}.` });
    this.aside = html(root, "div", { className: "cpp-aside" });
  }

  drawLevels() {
    const { number, words: { levels } } = this, done = this.model.get("done");
    this.levels.replaceChildren();
    const to = (text, label, level) => {
      const node = html(this.levels, "button", { type: "button", textContent: text, title: label }, { "aria-label": label });
      node.addEventListener("click", () => this.openLevel(level));
      return node;
    };
    levels.forEach((title, i) => {
      const is = done.includes(i + 1), node = to(is ? `${i + 1} ✓` : String(i + 1), `level ${i + 1}: ${title}${is ? ", done" : ""}`, i + 1);
      if (i + 1 === number) node.setAttribute("aria-current", "true");
    });
    const next = this.next();
    if (next) to("next", `next level that is not done: ${next}`, next);
  }

  // The next level that is not done, round the list; undefined if there is none.
  next() {
    const { number, words: { levels } } = this, done = this.model.get("done");
    return [...levels.keys()].map((i) => ((number + i) % levels.length) + 1).find((each) => !done.includes(each) && each !== number);
  }

  openLevel(level) {
    if (level === this.number) return;
    this.say(`Level ${level} opens as soon as the kernel answers.`);
    this.model.set("chosen", level);
    this.model.save_changes();
  }

  menu(parent, label, options) {
    const node = html(parent, "select", {}, { "aria-label": label });
    for (const option of options) html(node, "option", { value: option, textContent: option });
    return node;
  }

  // Take the moves from the model; the first that is illegal and what follows it are left out.
  read() {
    this.moves = [];
    this.position = new Position(this.game);
    for (const move of this.model.get("moves")) {
      try {
        play(this.position, move);
      } catch (refused) {
        if (!(refused instanceof Refused)) throw refused;
        break;
      }
      this.moves.push(move);
    }
    this.undone = this.model.get("undone");
    this.rung = 0;
    this.draw();
  }

  // Take a position from its text, or from a link that ends in it.
  load(text, after = "") {
    const given = new URLSearchParams(text.slice(text.indexOf("#") + 1).trim()), level = given.get("level");
    const refuse = (why) => {
      this.text.value = this.written();
      this.say(`Not loaded: ${why}${after}.`, "refused");
    };
    if (/^\d+$/.test(level) && this.number) {
      if (!this.words.levels[level - 1]) return refuse(`there is no level ${level}; levels are 1 to ${this.words.levels.length}`);
      if (Number(level) !== this.number) return refuse(`it is of level ${Number(level)}, and this is level ${this.number}: choose level ${Number(level)} first`);
      given.set("level", Number(level));
    }
    if (given.getAll("moves").length > 1) return refuse("moves= is there twice: give it once");
    if (!given.has("moves")) {
      const start = /moves=/.test(text) ? "& is missing before moves" : /^\s*\d+[FBIW]\d/.test(text) ? `moves alone: put ${this.head}&moves= before them` : "this is no position";
      return refuse(`${start}; one reads ${this.head}&moves=0F0.1F0`);
    }
    const moves = given.get("moves").split(".").filter(Boolean);
    given.delete("moves");
    const head = decodeURIComponent(String(given)), plain = (each) => each.replace("level=", "level ");
    if (!head) return refuse(`it says no ${this.number ? "level" : "stages"}; one reads ${this.head}&moves=0F0.1F0`);
    if (head !== this.head) return refuse(`it is of ${plain(head)}, and this board is ${plain(this.head)}`);
    const position = new Position(this.game);
    for (const [i, move] of moves.entries()) {
      try {
        if (!MOVE.test(move)) throw new Refused("unknown", /[FBIW].*[FBIW]/.test(move) ? "put a dot between moves" : FORM);
        play(position, move);
      } catch (refused) {
        if (!(refused instanceof Refused)) throw refused;
        return refuse(`move ${i + 1}, ${move}: ${refused.message}`);
      }
    }
    this.at = null;
    const isSame = moves.join(".") === flat(this.moves);
    this.commit(isSame ? this.moves : [...this.moves, `=${moves.join(".")}`], isSame ? this.undone : [],
      `Loaded: ${moves.length} ${moves.length === 1 ? "move" : "moves"}.`);
  }

  written() {
    return `${this.head}&moves=${this.position.spans.length ? flat(this.moves) : ""}`;
  }

  commit(moves, undone, text) {
    if (this.model.get("chosen") !== this.number) return; // another level is about to open
    this.model.set("moves", moves);
    this.model.set("undone", undone);
    this.time = null;
    this.read();
    const told = this.outcome(text); // it may mark a level as done
    this.model.save_changes();
    this.say(...told);
  }

  say(text, kind = "") {
    this.now.dataset.kind = kind;
    this.now.textContent = text.replace(/^[a-z]/, (first) => first.toUpperCase());
  }

  attempt(does) {
    try {
      does();
    } catch (refused) {
      if (!(refused instanceof Refused)) throw refused;
      this.say(`Not allowed: ${refused.message}.`, "refused");
    }
  }

  place(action) {
    this.attempt(() => {
      const { rank, start, end } = this.position.spanOf(action, this.at), index = this.position.place(action, this.at);
      this.at = null;
      const text = `${action} on rank ${rank} from ${spelled(start)} to ${spelled(end)}.`;
      this.commit([...this.moves, index === null ? action : `${action}@${index}`], [], text);
    });
  }

  // What is to be said after a move: `text`, and whether the board is full or cannot become full any more.
  outcome(text) {
    const { position, words: { par, bound } } = this;
    if (position.left) return position.finishes() ? [text, ""] : [`${text} ${this.stuck()}`, "refused"];
    const end = position.makespan, share = Math.round((100 * bound) / end);
    const score = `${text} Complete: makespan ${spelled(end)}, score ${share}% (no order beats ${spelled(bound)})`;
    if (par === null) return [`${score}.`, ""];
    if (end > par) return [`${score}; par is ${spelled(par)}. ${this.lost()}`, ""];
    const done = this.model.get("done"), next = this.next();
    if (!done.includes(this.number)) this.model.set("done", [...done, this.number]);
    return [`${score}: par. ${next ? `Next: level ${next} (key n).` : "All twelve done."}`, "good"];
  }

  full() {
    this.say(...this.outcome("The board is full."));
  }

  // After par to the next level.
  onward() {
    this.full();
    if (this.next() && this.position.makespan <= this.words.par) this.openLevel(this.next());
  }

  // The moves that made what is on the board: none that was taken away since.
  standing() {
    const moves = flat(this.moves).split("."), last = new Map(moves.map((move, i) => [move.split("@")[0], i]));
    const placed = new Set(this.position.spans.map((span) => last.get(span.action)));
    return moves.filter((_, i) => placed.has(i));
  }

  // How to take an action back: undo does not reach into a position that was loaded.
  back(action) {
    const at = this.moves.findLastIndex((move) => move.split("@")[0] === action), count = this.moves.length - at;
    const undo = at < 0 || at < this.moves.findLastIndex((move) => move.startsWith("=")) ? "" : `u${count === 1 ? "" : ` (${count} times)`} or by `;
    return `Take ${action} back, by ${undo}Delete on it`;
  }

  // The first move after which `holds` is no longer true of the board, and the position before it.
  turn(holds) {
    const moves = this.standing(), before = (count) => replay(this.game, moves.slice(0, count));
    let low = 0;
    for (let high = moves.length; high - low > 1; ) {
      const middle = (low + high) >> 1;
      if (holds(before(middle))) low = middle;
      else high = middle;
    }
    return [moves[low], before(low)];
  }

  stuck() {
    const [move] = this.turn((position) => position.finishes());
    return `Stuck: after ${move} the caps leave no way to the end. ${this.back(move.split("@")[0])}.`;
  }

  lost() {
    const [move, before] = this.turn((position) => this.plan(position).end <= this.words.par), plan = this.plan(before);
    const action = move.split("@")[0], rank = before.rankOf(action);
    const [better, at] = plan.first ?? [plan.order[rank][before.rows[rank].length], null];
    const waited = plan.first && this.waited(before, plan.first);
    if (waited) return waited;
    let instead = `rank ${rank} does better to wait for ${better}`;
    if (better === action) instead = `in the gap from ${spelled(at)} it keeps par`;
    else if (!before.whyNot(better, at)) instead = `${better} at ${spelled(before.spanOf(better, at).start)} keeps it`;
    return `Par was lost with ${action} on rank ${rank}: ${instead}. ${this.back(action)}.`;
  }

  // Where only an action in a gap keeps par, the wait that left the gap is to blame, if something could start then.
  waited(position, [better, from]) {
    const moves = this.standing(), rank = position.rankOf(better), { action, start } = position.rows[rank].find((span) => span.start > from);
    const before = replay(this.game, moves.slice(0, moves.findIndex((move) => move.split("@")[0] === action)));
    const could = before.legal(rank).filter((each) => before.startOf(each) < start).find((each) => {
      const copy = before.copy();
      copy.place(each);
      return this.plan(copy).end <= this.words.par;
    });
    return could && `Rank ${rank} waited from ${spelled(from)} to ${spelled(start)} though ${could} could start: that cost par. ` +
      `${this.back(action)}, and place ${could} at ${spelled(before.startOf(could))}.`;
  }

  // The order that is best from a position on; the worked one if that is still followed.
  plan(position) {
    const { par, bound, worked } = this.words, [name] = Object.keys(worked);
    if (!name || !follows(position, worked[name])) return best(position, par ?? bound);
    return { from: `from ${name in this.references ? name : "a worked order"}`, end: par, order: worked[name], sure: true };
  }

  undo() {
    if (!this.moves.length) return this.say("There is nothing to undo.", "refused");
    const last = this.moves.at(-1);
    this.commit(this.moves.slice(0, -1), [last, ...this.undone], `Undone: ${named(last)}.`);
  }

  redo() {
    if (!this.undone.length) return this.say("There is nothing to redo.", "refused");
    const [next, ...rest] = this.undone;
    this.commit([...this.moves, next], rest, `Redone: ${named(next)}.`);
  }

  remove() {
    const span = this.under();
    if (!span) return this.say("There is nothing here to take away.", "refused");
    this.at = null;
    this.commit([...this.moves, `-${span.action}`], [], `Took ${span.action} away, and what came after it or needs it.`);
  }

  // Let a policy, a named order or the stamp place up to so many; stop at what is strange if asked.
  go(most, watch = false, by = this.policy.value) {
    if (!this.position.left) return this.full();
    const stamp = by === "the stamp", every = Number(this.every.value), moves = [];
    if (stamp && !this.every.validity.valid) return this.say("Every: give a whole number from 1, or leave it empty.", "refused");
    const references = stamp ? { [by]: stamped(this.position, every) } : this.references;
    if (stamp && references[by].every((row, rank) => row.length === this.position.rows[rank].length)) {
      return this.say(`There is nothing to stamp: no rank has ended on what it did ${every ? `${every} ${every === 1 ? "microbatch" : "microbatches"} earlier` : "for an earlier microbatch"}.`, "refused");
    }
    let taken = null;
    while (moves.length < most && (taken = step(this.position, by, references, watch || most === 1))) {
      moves.push(taken.action);
      if (watch && taken.strange.length) break;
    }
    const why = taken || !this.position.left ? "" : standstill(this.position, by, references), last = moves.at(-1);
    const remedy = stamp ? "Place one more cycle by hand on the rank that waits, then stamp." : "Undo, or choose another.";
    if (!moves.length) return this.say(`No move by ${by}: ${why}. ${this.position.finishes() ? remedy : this.stuck()}`, "refused");
    let text = `Placed ${moves.length === 1 ? "" : `${moves.length}, the last is `}${last}, by ${by}.`;
    this.rank = this.position.rankOf(last);
    this.at = null;
    if (taken?.strange.length && (watch || most === 1)) text += ` Strange here: ${taken.strange.join("; ")}.`;
    else if (why) text += ` Then it stops: ${why}.`;
    this.commit([...this.moves, ...moves], [], text);
  }

  // First where to look, then why, then the move itself: toward the best that the board can still become.
  hint() {
    const { position, rung, words: { par } } = this;
    if (!position.left) return this.full();
    if (!position.finishes()) return this.say(this.stuck(), "refused");
    if (!rung) this.planned = this.plan(position);
    const { end, order, sure, first, from } = this.planned, ask = (rank) => advice(position, "it", { it: order }, rank);
    const [action, at] = first ?? [ask(this.rank) ?? ask(null), null], start = spelled(position.spanOf(action, at).start);
    [this.rank, this.at] = [position.rankOf(action), at];
    this.draw();
    this.rung = Math.min(2, rung + 1);
    const toward = from ?? (end === (par ?? this.words.bound) ? `toward ${spelled(end)}` : sure ? `toward ${spelled(end)}, the best from here` : "a guess");
    const lost = par !== null && end > par && sure ? `${this.lost()} Or go on: ` : "";
    this.say([`${lost}look at rank ${this.rank}: it can act at ${start}. Press again for a reason.`,
      `${this.reason(action)}. Press again for the move.`, `Hint, ${toward}: ${action} on rank ${this.rank} at ${start}.`][rung]);
  }

  reason(action) {
    const { stage, kind, microbatch } = parse(action), held = heldAfter(this.position.rows[this.rank]).at(-1) ?? 0;
    if (kind === "W") return `Nobody waits for a weight gradient, so it fills time, and makes room: rank ${this.rank} holds ${held}`;
    if (kind === "F") {
      const next = stage + 1, rival = this.choices().find((each) => (this.game.split ? /W|^0I/ : /^0B/).test(each));
      if (next === this.position.stages) return `The way back begins on stage ${stage}: the backward of microbatch ${microbatch} needs ${action} first`;
      if (!rival) return `${action} is what stage ${next} waits for next`;
      return `Stage ${next} waits for ${action}; for ${rival} nobody waits${rival.includes("W") ? "" : ", stage 0 is the first"}`;
    }
    return stage ? `Stage ${stage - 1} waits for a gradient from stage ${stage}` : `A backward on stage 0 ends a microbatch: rank ${this.rank} holds ${held}`;
  }

  run() {
    if (!this.kernel) return this.say("Real ranks need a kernel: open notebook 11 with make lab.", "refused");
    const { placement, microbatches, split } = this.game, missing = placement.flatMap((_, stage) => [...Array(microbatches).keys()]
      .flatMap((i) => [...(split ? "FIW" : "FB")].map((kind) => `${stage}${kind}${i}`)))
      .find((action) => this.position.whyNot(action)?.why !== "placed");
    if (missing) return this.say(`Place every action first: a step needs all of them, and ${missing} is still missing.`, "refused");
    this.say(`Running on ${this.position.ranks} ranks; this takes seconds, and a kernel.`);
    // With the moves: while the kernel is busy, Jupyter holds changes of state back, and a message overtakes them.
    this.model.send({ do: "run", moves: this.moves });
  }

  togglePath() {
    this.path = !this.path;
    this.buttons.path.setAttribute("aria-pressed", this.path);
    this.draw();
    this.say(this.path ? `Critical path: ${this.position.criticalPath().join(" → ") || "nothing yet"}.` : "The critical path is hidden.");
  }

  togglePlay() {
    if (this.time !== null) {
      this.say(`Stopped at ${spelled(this.time)}.`);
      this.time = null;
      return this.draw();
    }
    const end = this.position.makespan, seconds = Math.min(12, Math.max(3, end / 3));
    const started = performance.now();
    const tick = (stamp) => {
      if (this.time === null || !this.root.isConnected) return;
      this.time = Math.min(end, (Math.max(0, stamp - started) / 1000 / seconds) * end);
      this.draw();
      if (this.time < end) requestAnimationFrame(tick);
      else {
        this.time = null;
        this.draw();
        this.say(`Played: ${spelled(end)}.`);
      }
    };
    if (!end) return this.say("There is nothing to play.", "refused");
    this.time = 0;
    this.say("Playing; p stops.");
    requestAnimationFrame(tick);
  }

  under() {
    if (this.at === null) return null;
    return this.position.rows[this.rank].find((span) => span.start <= this.at && this.at < span.end) ?? null;
  }

  end(rank = this.rank) {
    return this.position.rows[rank].at(-1)?.end ?? 0;
  }

  goTo(rank, at) {
    this.rank = Math.min(this.position.ranks - 1, Math.max(0, rank));
    this.at = at === null || at >= this.end() ? null : Math.max(0, at);
    this.rung = 0;
    this.draw();
    const span = this.under();
    const gap = this.position.gaps().find((each) => each[0] === this.rank && this.at !== null && each[1] <= this.at && this.at < each[2]);
    if (span) this.say(`${span.action}: ${WORDS[parse(span.action).kind]}, rank ${this.rank}, ${spelled(span.start)} to ${spelled(span.end)}.`);
    else if (gap) this.say(`${gap[3]}.`);
    else {
      const able = this.shown === SHOWN[0] ? "" : ` ${this.choices().join(", ") || "Nothing"} can be placed.`;
      this.say(`Rank ${this.rank}, free from ${spelled(this.end())}.${able}`);
    }
  }

  key(event) {
    if (event.altKey || event.metaKey || ["SELECT", "INPUT"].includes(event.target.tagName)) return;
    const shown = this.at ?? this.end(), press = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    const onButton = event.target.tagName === "BUTTON";
    const does = {
      ArrowUp: () => this.goTo(this.rank - 1, null), ArrowDown: () => this.goTo(this.rank + 1, null),
      ArrowLeft: () => this.goTo(this.rank, Math.max(0, shown - this.step)),
      ArrowRight: () => this.goTo(this.rank, shown + this.step),
      Home: () => this.goTo(this.rank, 0), End: () => this.goTo(this.rank, null),
      u: () => this.undo(), z: event.ctrlKey ? () => this.undo() : undefined, y: () => this.redo(),
      Delete: () => this.remove(), Backspace: () => this.remove(), h: () => this.hint(), c: () => this.togglePath(),
      p: () => this.togglePlay(), " ": () => this.togglePlay(), r: () => this.run(), n: () => (this.position.left ? this.go(1) : this.onward()), s: () => this.go(Infinity, true),
      t: () => this.go(Infinity, false, "the stamp"),
    }[press];
    const letter = press.toUpperCase();
    const place = !event.ctrlKey && press.length === 1 && "FBIW".includes(letter)
      ? () => this.attempt(() => this.place(this.position.nextOf(this.rank, letter, this.at))) : undefined;
    const number = /^[1-9]$/.test(press) ? () => this.choose(Number(press)) : undefined;
    const found = does ?? place ?? number;
    if (!found || (event.ctrlKey && !"zy".includes(press)) || (onButton && (press === "Enter" || press === " "))) return;
    event.preventDefault();
    event.stopPropagation();
    found();
  }

  choose(n) {
    const action = this.choices()[n - 1];
    if (action) this.place(action);
    else this.say(`There is no choice ${n}.`, "refused");
  }

  choices() {
    try {
      return this.position.legal(this.rank, this.at);
    } catch (refused) {
      if (refused instanceof Refused) return [];
      throw refused;
    }
  }

  click(event, twice = false) {
    const box = this.chart.getBoundingClientRect(), scale = WIDTH / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const rank = Math.floor((y - TOP) / this.row);
    if (rank < 0 || rank >= this.position.ranks || x < LEFT) return;
    this.goTo(rank, Math.floor((x - LEFT) / this.scale / this.step) * this.step);
    if (twice && this.under()) this.remove();
  }

  draw() {
    const { position, chart } = this, { par, bound } = this.words;
    const ran = this.model.get("ran");
    const run = ran && ran.of === this.moves.join(" ") ? ran : null;
    const other = this.versus ? this.ordered(this.versus) : null;
    const under = (other ? 1 : 0) + (run ? 1 : 0);
    this.row = BOX + STRIP + GAP + under * 14;
    const height = TOP + this.row * position.ranks + 4;
    const ends = [position.makespan + this.step, ...(other ?? []).map((span) => span.end), run ? run.end : 0];
    const base = Math.max(8 * this.step, (par ?? bound) + 2 * this.step); // beyond it the axis grows by quarters, not with each move
    this.scale = (WIDTH - LEFT - RIGHT) / (base * Math.max(1, Math.ceil((4 * Math.max(...ends)) / base) / 4));
    chart.replaceChildren();
    chart.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    chart.setAttribute("aria-label", this.summary());
    this.drawPatterns();
    this.drawAxis(height);
    const path = this.path ? position.criticalPath() : [];
    for (let rank = 0; rank < position.ranks; rank += 1) this.drawRank(rank, path);
    position.rows.forEach((_, rank) => svg(chart, "text", { x: 2, y: TOP + this.row * rank + 20, "font-size": 12, class: "cpp-name",
      "font-weight": rank === this.rank ? "bold" : "normal" }, `${rank === this.rank ? "▸" : "\u00a0\u00a0"}rank ${rank}`));
    this.keepNames();
    for (const [i, spans, name] of [[0, other, this.versus], [other ? 1 : 0, run && run.spans.map(([rank, action, start, end]) => ({ rank, action, start, end })), run?.how]]) {
      if (spans) this.drawBelow(i, spans, name);
    }
    if (this.time !== null) {
      const x = LEFT + this.time * this.scale;
      svg(chart, "rect", { x, y: TOP, width: Math.max(0, WIDTH - RIGHT - x), height: height - TOP - 4, fill: "var(--paper)", "fill-opacity": 0.65 });
      svg(chart, "path", { d: `M${x} ${TOP - 4}V${height}`, stroke: "var(--ink)", "stroke-width": 2 });
      if (this.time < position.makespan) return; // words and buttons wait until it has played
    }
    const { parentNode: box } = chart, cursor = ((LEFT + (this.at ?? this.end()) * this.scale) / WIDTH) * box.scrollWidth - box.scrollLeft;
    if (cursor < 0 || cursor > box.clientWidth - 40) box.scrollLeft += cursor - box.clientWidth / 2; // where the page is narrow
    this.drawWords(run);
  }

  // Ranks' names stay at the left edge of what is visible.
  keepNames() {
    const { scrollLeft, scrollWidth } = this.chart.parentNode;
    for (const node of this.chart.querySelectorAll(".cpp-name")) node.setAttribute("x", 2 + (scrollLeft / scrollWidth) * WIDTH);
  }

  drawPatterns() {
    const definitions = svg(this.chart, "defs", {});
    for (const [kind, colour] of Object.entries(COLOURS)) {
      const pattern = svg(definitions, "pattern", { id: `${this.id}-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse" });
      svg(pattern, "rect", { width: 6, height: 6, fill: colour });
      if (STROKES[kind]) svg(pattern, "path", { d: STROKES[kind], stroke: "#fff", "stroke-opacity": 0.55 });
    }
  }

  drawAxis(height) {
    // One very short action makes the step tiny: lines that would lie closer than this are left out.
    const wide = this.step * this.scale, decade = 10 ** Math.max(0, Math.floor(Math.log10(34 / wide)));
    const every = [1, 2, 5, 10].map((each) => each * decade).find((each) => each * wide >= 34) ?? 10 * decade;
    for (let i = 0; LEFT + i * wide <= WIDTH - RIGHT + 0.5; i += wide >= 4 ? 1 : every) {
      const time = i * this.step, x = LEFT + i * wide, named = i % every === 0;
      svg(this.chart, "path", { d: `M${x} ${TOP - 4}V${height - 4}`, stroke: "var(--line)", "stroke-opacity": named ? 0.45 : 0.16 });
      if (named) svg(this.chart, "text", { x, y: 12, "font-size": 11, "text-anchor": "middle" }, spelled(time));
    }
    const { par } = this.words;
    if (par !== null) {
      const x = LEFT + par * this.scale;
      svg(this.chart, "path", { d: `M${x} ${TOP - 6}V${height - 4}`, stroke: "var(--mark)", "stroke-width": 2, "stroke-dasharray": "5 4" });
      svg(this.chart, "text", { x, y: TOP - 9, "font-size": 11, "text-anchor": "middle" }, "par");
    }
  }

  drawRank(rank, path) {
    const { chart, position } = this, top = TOP + this.row * rank + 2, right = WIDTH - RIGHT;
    svg(chart, "rect", { x: LEFT, y: top, width: right - LEFT, height: BOX, fill: "var(--idle)" });
    const several = position.stagesOf[rank].length > 1;
    for (const span of position.rows[rank]) this.drawBox(span, top, BOX, several, path.includes(span.action));
    this.drawMemory(rank, top + BOX + 1);
    this.drawPhases(rank, top + BOX + STRIP + 3);
    if (rank !== this.rank || (this.at === null && !position.leftOn(rank))) return;
    const here = this.under(), at = here ? here.start : this.at ?? this.end();
    const width = Math.max(6, (here ? here.end - here.start : this.step) * this.scale);
    svg(chart, "rect", { x: LEFT + at * this.scale + 1, y: top - 1, width: width - 2, height: BOX + 2, fill: "none", stroke: "var(--ink)",
      "stroke-width": 2, "stroke-dasharray": here ? "" : "4 3" });
  }

  drawBox(span, y, height, several, marked) {
    const { kind, microbatch } = parse(span.action), x = LEFT + span.start * this.scale;
    const width = (span.end - span.start) * this.scale;
    svg(this.chart, "rect", { x: x + 0.5, y, width: Math.max(1, width - 1), height, fill: `url(#${this.id}-${kind})`,
      stroke: marked ? "var(--ink)" : "none", "stroke-width": marked ? 3 : 0 });
    const size = Math.min(12, height - 1);
    for (const label of [several ? span.action : `${kind}${microbatch}`, String(microbatch)]) {
      if (size >= 8 && 0.68 * size * label.length + 2 <= width) {
        svg(this.chart, "text", { x: x + width / 2, y: y + height / 2 + 0.36 * size, "font-size": size, "text-anchor": "middle",
          class: "cpp-on-box", style: `stroke: ${COLOURS[kind]}` }, label);
        break;
      }
    }
  }

  // A bar below the row: as high as what the rank holds, up to its cap.
  drawMemory(rank, y) {
    const row = this.position.rows[rank], held = heldAfter(row), cap = this.game.limits[rank];
    const most = cap ?? Math.max(1, ...this.position.peaks);
    row.forEach((span, i) => {
      const from = parse(span.action).kind === "F" ? span.start : span.end;
      const next = row[i + 1], until = !next ? this.position.makespan : parse(next.action).kind === "F" ? next.start : next.end;
      const high = (STRIP * held[i]) / most;
      svg(this.chart, "rect", { x: LEFT + from * this.scale, y: y + STRIP - high, width: Math.max(0, until - from) * this.scale, height: high,
        fill: "var(--quiet)", "fill-opacity": held[i] === cap ? 0.95 : 0.5 });
    });
    svg(this.chart, "path", { d: `M${LEFT} ${y + STRIP}H${WIDTH - RIGHT}`, stroke: "var(--line)", "stroke-opacity": 0.6 });
    svg(this.chart, "text", { x: WIDTH - RIGHT + 6, y: y + STRIP, "font-size": 11 }, `holds ${Math.max(0, ...held)}${cap === null ? "" : `/${cap}`}`);
  }

  // Until the first backward; from the last forward on; and what is between.
  drawPhases(rank, y) {
    const row = this.position.rows[rank], isForward = (span) => parse(span.action).kind === "F";
    if (!row.length) return;
    const end = row.at(-1).end, total = this.position.stagesOf[rank].length * this.game.microbatches;
    const back = row.find((span) => !isForward(span))?.start ?? end;
    const drain = row.filter(isForward).length === total ? Math.max(back, row.findLast(isForward).end) : end;
    for (const [name, from, to] of [["warm-up", row[0].start, back], ["steady", back, drain], ["drain", drain, end]]) {
      const x = LEFT + from * this.scale, width = (to - from) * this.scale;
      if (width < 3) continue;
      svg(this.chart, "path", { d: `M${x + 1} ${y + 3}V${y}H${x + width - 1}V${y + 3}`, fill: "none", stroke: "var(--quiet)" });
      const text = width > 44 ? name : name === "warm-up" ? "" : name[0]; // a w would be a weight gradient
      svg(this.chart, "text", { x: x + width / 2, y: y + 9, "font-size": 9, "text-anchor": "middle" }, text);
    }
  }

  drawBelow(i, spans, name) {
    const rows = [...this.position.rows.keys()];
    for (const rank of rows) {
      const y = TOP + this.row * rank + 2 + BOX + STRIP + 14 + 14 * i;
      svg(this.chart, "text", { x: WIDTH - RIGHT + 6, y: y + 9, "font-size": 9 }, name.length > 11 ? `${name.slice(0, 10)}…` : name);
      for (const span of spans) if (span.rank === rank) this.drawBox(span, y, 11, false, false);
    }
  }

  ordered(name) {
    const free = new Position({ ...this.game, limits: this.game.limits.map(() => null) });
    fill(free, name, this.references);
    return free.spans;
  }

  drawWords(run) {
    const { position, facts, palette, words } = this;
    facts.replaceChildren();
    const fact = (name, value, className = "") => {
      const node = html(facts, "span", { className });
      html(node, "span", { textContent: `${name} ` });
      html(node, "b", { textContent: value });
    };
    const total = 3 * position.stages * this.game.microbatches;
    fact("makespan", spelled(position.makespan));
    if (words.par === words.bound) fact("par", `${spelled(words.par)}, which no order beats`);
    else {
      if (words.par !== null) fact("par", spelled(words.par));
      fact("no order beats", spelled(words.bound));
    }
    fact("done", `${Math.floor((100 * (total - position.left)) / total)}%`);
    const { limits } = this.game;
    if (limits.some((limit) => limit !== null)) fact("caps", limits.map((limit) => limit ?? "none").join(", "), "cpp-narrow");
    const known = recognised(position, this.references);
    fact(position.left ? "so far this is" : "this is", known.length ? known.slice(0, 3).join(" or ") : position.spans.length ? "yours" : "empty");
    const paper = !position.left && words.papers[known[0]];
    if (paper) html(html(facts, "span"), "a", { href: paper, target: "_blank", rel: "noopener", textContent: "its paper" });
    if (this.versus) fact("compared:", this.compared(true));
    if (run) fact(run.how, `${spelled(run.end)}, ${run.verdict}`);
    palette.replaceChildren();
    html(palette, "span", { textContent: this.at === null ? `rank ${this.rank}${position.leftOn(this.rank) ? " next" : ""}:` : `rank ${this.rank} at ${spelled(this.at)}:` });
    const hidden = this.shown === SHOWN[0], choices = hidden ? [] : this.choices();
    choices.slice(0, 9).forEach((action, i) => {
      const node = html(palette, "button", { type: "button", textContent: `${i + 1}: ${action}${this.shown === SHOWN[2] ? this.leadsTo(action) : ""}` },
        { "aria-label": `place ${action}, ${WORDS[parse(action).kind]} of microbatch ${parse(action).microbatch}, key ${i + 1}` });
      node.addEventListener("click", () => {
        this.place(action);
        this.root.focus();
      });
    });
    if (!choices.length) html(palette, "span", { textContent: hidden ? "what is it?" : this.why() });
    this.text.value = this.written();
    this.buttons.undo.disabled = !this.moves.length;
    this.buttons.redo.disabled = !this.undone.length;
    this.aside.textContent = this.summary();
  }

  leadsTo(action) {
    const { simple } = this, copy = this.position.copy();
    copy.place(action, this.at);
    const row = copy.rows[this.rank], span = row.find((each) => each.action === action);
    const told = `, ${spelled(span.start)} to ${spelled(span.end)}, holds ${heldAfter(row)[row.indexOf(span)]}`;
    if (copy.left > 120) return told; // its rest would take too long to place
    fill(copy, simple, {});
    return `${told}; then ${simple} ${copy.left ? "is stuck" : `ends at ${spelled(copy.makespan)}`}`;
  }

  compared(brief = false) {
    const ends = this.ordered(this.versus), over = [];
    const makespan = Math.max(...ends.map((span) => span.end));
    this.game.limits.forEach((limit, rank) => {
      const held = Math.max(0, ...heldAfter(ends.filter((span) => span.rank === rank)));
      if (limit !== null && held > limit) over.push(`rank ${rank} holds ${held}, its cap is ${limit}`);
    });
    if (brief) return `${this.versus} ${spelled(makespan)}${over.length ? ", above the cap" : ""}`;
    return `${this.versus} ends at ${spelled(makespan)}${over.length ? `, above the cap: ${over.join("; ")}` : ""}`;
  }

  // Why nothing can be placed where the cursor is.
  why() {
    try {
      this.position.indexAt(this.rank, this.at);
      if (!this.position.leftOn(this.rank)) return "all of its actions are placed";
      for (const kind of this.game.split ? "IFW" : "BF") {
        try {
          this.position.nextOf(this.rank, kind, this.at);
        } catch (refused) {
          if (!(refused instanceof Refused)) throw refused;
          const isOwn = refused.message.includes("its own forward"); // that forward's own reason is worth more
          if (refused.why !== "nothing" && !isOwn) return `nothing: ${refused.message}`;
        }
      }
      return "nothing";
    } catch (refused) {
      if (refused instanceof Refused) return refused.message;
      throw refused;
    }
  }

  summary() {
    const rows = this.position.rows.map((row, rank) => `rank ${rank}: ` +
      (row.map((span) => `${span.action} ${spelled(span.start)} to ${spelled(span.end)}`).join(", ") || "nothing"));
    return `${this.position.ranks} ranks, makespan ${spelled(this.position.makespan)}. ${rows.join(". ")}.`;
  }
}

function render({ model, el }) {
  const view = new View(model, html(el, "div"));
  const again = () => view.read();
  const told = () => {
    if (view.game !== model.get("game")) return; // the view opens anew
    view.words = model.get("words");
    view.draw();
    if (view.words.said) view.say(view.words.said);
  };
  const ran = () => {
    view.draw();
    const outcome = model.get("ran");
    if (outcome.said) view.say(outcome.said, outcome.kind);
  };
  const open = () => view.open();
  const marked = () => view.drawLevels();
  model.on("change:game", open);
  model.on("change:done", marked);
  model.on("change:moves", again);
  model.on("change:undone", again);
  model.on("change:words", told);
  model.on("change:ran", ran);
  return () => {
    model.off("change:game", open);
    model.off("change:done", marked);
    model.off("change:moves", again);
    model.off("change:undone", again);
    model.off("change:words", told);
    model.off("change:ran", ran);
  };
}

export default { render };
